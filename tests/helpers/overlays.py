"""Other transformers releases, each in a folder of its own that goes in front of `sys.path`.

`python tests/helpers/overlays.py FOLDER` installs them. Their shared dependencies come from the environment; only
what a release pins differently is installed beside it.
"""

import os
import subprocess
import sys
from pathlib import Path

# the ends of the supported range and SGLang's pins; the newest release is the environment's own
OVERLAYS = {
    "5.12.1": ["huggingface_hub==1.33.0", "tokenizers==0.22.2"],
    "5.17.0": ["huggingface_hub==1.33.0"],
    "5.19.0": [],
}

# where they are installed, as `make test` says; tests that need them are skipped without it
OVERLAY_FOLDER = os.environ.get("DSPINE_OVERLAYS")


def install(folder: Path, versions: list[str] | None = None) -> None:
    """Install overlays below `folder`, all of them by default; those that are there already stay."""
    for version in versions or OVERLAYS:
        place = folder / version
        if not place.is_dir():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place)]
            subprocess.run([*command, f"transformers=={version}", *OVERLAYS[version]], check=True)


if __name__ == "__main__":
    install(Path(sys.argv[1]))
