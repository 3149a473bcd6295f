"""`python -m dspine_hub`."""

import sys

try:
    from dspine_hub.cli import main
except ModuleNotFoundError as error:
    sys.exit(f"`{error.name}` must be installed to run dspine-hub: run `pip install -e .` in the checkout.")

if __name__ == "__main__":
    main(prog_name="dspine-hub")
