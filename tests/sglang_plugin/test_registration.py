"""Which releases the plugin registers with, and that it costs the others nothing."""

import importlib.metadata
import logging
import subprocess
import sys

import pytest
from helpers.paths import ROOT
from helpers.sglang_engines import ENGINES

from dspine_hub import sglang_plugin
from dspine_hub.sglang_plugin import doctor

VERSIONS = {"0.5.18": False, "0.5.19": True, "0.5.21.post1": True, "0.5.23+cu130": True, "0.5.24": False}
VERSIONS |= {"0.6.0": False, "0.5.22rc1": False, "0.0.0.dev0": False, "unknown": False}


@pytest.mark.parametrize(("version", "supported"), VERSIONS.items())
def test_versions(version, supported):
    assert sglang_plugin.is_supported(version) is supported


def test_every_statement_of_the_supported_range_agrees():
    """Catches a range that is widened in one place only."""
    (extra,) = [line for line in importlib.metadata.requires("dspine-hub") if line.startswith("sglang")]
    oldest, newest = sglang_plugin.SUPPORTED.split(" to ")
    assert (oldest, newest) == (min(ENGINES), max(ENGINES))
    after = f"0.5.{int(newest.split('.')[-1]) + 1}"
    assert f">={oldest}" in extra and f"<{after}" in extra
    for page in ("docs/serve.md", "CONTRIBUTING.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert oldest in text and f"to {newest}" in text, page


def test_another_release_gets_one_line_and_no_registration(stand_ins, caplog):
    """Catches a plugin that fails in silence: SGLang goes on without it."""
    stand_ins("sglang.version", __version__="0.5.18")
    with caplog.at_level(logging.ERROR):
        sglang_plugin.register()
    (record,) = caplog.records
    assert "supports sglang 0.5.19 to 0.5.23, got 0.5.18" in record.getMessage()
    assert "dspine_hub.sglang_plugin.registration" not in sys.modules


def test_the_entry_point_resolves():
    (entry,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name=doctor.ENTRY_POINT)
    assert entry.load() is sglang_plugin.register


def test_importing_the_plugin_loads_neither_torch_nor_sglang():
    """Catches work that every process of SGLang would pay for."""
    code = (
        "import dspine_hub.sglang_plugin, sys; print(sorted({'torch', 'transformers', 'sglang'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
