"""Publish, load, check, serve and reproduce DSpine speculative-decoding drafters.

Importing this loads neither torch nor transformers; names below are resolved on first use.
"""

import importlib

from dspine_hub._version import __version__

# name -> where it is defined
_LAZY = {
    "DSpineConfig": "configuration_dspine",
    "DSpineForSpeculation": "modeling_dspine",
    "DSpineGenerateOutput": "generation_dspine",
    "DSpineHubError": "errors",
    "DSpineStatistics": "generation_dspine",
    "build_bundle": "publish.build",
    "convert": "api",
    "diff": "publish.compare",
    "generate": "api",
    "load": "api",
    "pull": "publish.pull",
    "push": "publish.push",
    "summarize": "generation_dspine",
    "verify": "publish.verify",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name):
    if name not in _LAZY:
        raise AttributeError(f"module `dspine_hub` has no attribute `{name}`")
    if _LAZY[name].startswith(("api", "publish")):
        importlib.import_module("dspine_hub.environment").require_installed()
    return getattr(importlib.import_module(f"dspine_hub.{_LAZY[name]}"), name)


def __dir__():
    return sorted(__all__)
