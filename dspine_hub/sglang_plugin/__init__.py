"""DSPINE for a stock SGLang: `register` is the entry point of its plugin group `sglang.srt.plugins`.

SGLang calls it once in each of its processes and only logs what it raises, so the version is judged first, in one
plain line. Importing this package loads neither torch nor sglang.
"""

import logging
import re

OLDEST, NEWEST = (0, 5, 19), (0, 5, 23)
SUPPORTED = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))

logger = logging.getLogger(__name__)


def is_supported(version: str) -> bool:
    """Tell whether a version of SGLang, like `0.5.21` or `0.5.21.post1`, is one this plugin was tested with."""
    release = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\.post\d+)?(\+.*)?", version)
    return release is not None and OLDEST <= tuple(map(int, release.groups()[:3])) <= NEWEST


def register() -> None:
    """Register config class, architectures and the algorithm DSPINE with the SGLang of this process.

    Calling it again changes nothing. On a version outside the tested range it registers nothing and says so.
    """
    from sglang.version import __version__

    if not is_supported(__version__):
        logger.error(
            f"DSPINE is not available: dspine-hub supports sglang {SUPPORTED}, got {__version__}. "
            f'Run `pip install "sglang>={SUPPORTED.split()[0]},<={SUPPORTED.split()[-1]}"`.'
        )
        return
    from dspine_hub.sglang_plugin.registration import register_all

    register_all()


__all__ = ["SUPPORTED", "is_supported", "register"]
