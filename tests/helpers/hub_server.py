"""Start the Hub of the tests by hand: `python tests/helpers/hub_server.py PORT FOLDER`.

Port 0 takes a free one; the address is printed. Tokens and routes are those of `loopback_hub/`.
"""

import os
import sys

from loopback_hub import HubServer


def main(port, folder):
    hub = HubServer(folder, int(port))
    print(hub.url, flush=True)
    hub.serve_forever()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {os.path.relpath(__file__)} PORT FOLDER")
    main(*sys.argv[1:])
