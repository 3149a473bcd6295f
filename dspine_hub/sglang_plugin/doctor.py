"""What this machine would do with a drafter: versions, the plugin's state as SGLang sees it, the GPU."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys

from dspine_hub.findings import Report
from dspine_hub.sglang_plugin import SUPPORTED, is_supported
from dspine_hub.sglang_plugin.command import INSTALL, installed_sglang

PACKAGES = ("dspine-hub", "sglang", "sglang-kernel", "flashinfer_python", "torch", "transformers", "triton")
# another build of these is the usual reason why an engine does not start
PINNED = ("torch", "transformers", "sglang-kernel", "flashinfer_python")
ENTRY_POINT = "dspine"
PROBE_SECONDS = 300


def examine() -> dict:
    """Examine this environment.

    Returns:
        `dict`: `ok`, `versions`, `plugin` (`entry_point`, `probe`), `gpus` (their names) and `findings`.
    """
    versions = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    report, plugin = Report(), {"entry_point": _entry_point(), "probe": None}
    gpus = _gpus(report)
    if installed_sglang() is None:
        report.add("error", "sglang", "`sglang` must be installed to serve, got none.", INSTALL)
    elif not is_supported(versions["sglang"]):
        report.add("error", "sglang", f"`sglang` must be {SUPPORTED}, got {versions['sglang']}.", INSTALL)
    else:
        _check_pins(report, versions)
        _check_plugin(report, plugin)
    return {"versions": versions, "plugin": plugin, "gpus": gpus, **report.as_dict()}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _entry_point() -> str | None:
    found = importlib.metadata.entry_points(group="sglang.srt.plugins", name=ENTRY_POINT)
    return next((entry.value for entry in found), None)


def _gpus(report: Report) -> list[str]:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if not names:
        report.add("warning", "gpu", "no CUDA device was found: SGLang serves drafters on a GPU only.")
    return names


def _check_pins(report: Report, versions: dict) -> None:
    for line in importlib.metadata.requires("sglang") or []:
        match = re.match(r"([A-Za-z0-9_-]+)(?:\[[^\]]*\])?==([^;\s]+)\s*$", line)
        if match is None or match[1] not in PINNED:
            continue
        name, wanted = match.groups()
        found = versions.get(name)
        if found is None or found.partition("+")[0] != wanted:
            message = f"`{name}` must be {wanted} for sglang {versions['sglang']}, got {found or 'none'}."
            report.add("warning", "pin", message, f'pip install "{name}=={wanted}"')


def _check_plugin(report: Report, plugin: dict) -> None:
    if plugin["entry_point"] is None:
        message = "the entry point `dspine` of `sglang.srt.plugins` must be installed, got none."
        report.add("error", "entry-point", message, "pip install --force-reinstall --no-deps dspine-hub")
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", ENTRY_POINT).split(",") if name.strip()]
    if ENTRY_POINT not in allowed:
        message = f"`SGLANG_PLUGINS` must name `{ENTRY_POINT}` when it is set, got {','.join(allowed)!r}."
        report.add("error", "whitelist", message, f"export SGLANG_PLUGINS={','.join([*allowed, ENTRY_POINT])}")
    command = [sys.executable, "-m", "dspine_hub.sglang_plugin"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        report.add("error", "import", f"SGLang must import within {PROBE_SECONDS} s, got no answer.")
        return
    lines = result.stdout.splitlines()
    if result.returncode != 0 or not lines:
        report.add("error", "import", f"SGLang could not be imported: {_last_line(result.stderr)}", INSTALL)
        return
    plugin["probe"] = json.loads(lines[-1])
    probe = plugin["probe"]
    if not (probe["algorithm"] and probe["config"] and len(probe["architectures"]) == 2):
        message = f"the plugin must register DSPINE, its config and two architectures, got {probe}."
        report.add("error", "registration", f"{message} {_last_line(result.stderr)}")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
