"""`python -m dspine_hub.sglang_plugin`: load plugins as a process of SGLang would and print what came of it."""

import json


def probe() -> dict:
    """Return what this process' SGLang knows after loading its plugins.

    Returns:
        `dict`: `sglang` (its version), `algorithm` (is DSPINE known), `architectures` (ours among those known) and
        `config` (is the config class known).
    """
    from sglang.srt.plugins import load_plugins
    from sglang.version import __version__

    load_plugins()
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.speculative.spec_registry import get_spec
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = [name for name in ("DSpineForSpeculation", "DSpineDraftModel") if name in ModelRegistry.models]
    return {
        "sglang": __version__,
        "algorithm": get_spec("DSPINE") is not None,
        "architectures": known,
        "config": "dspine" in CONFIG_MAPPING,
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
