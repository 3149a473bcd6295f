"""Open a bundle the way a stranger will, and say everything that is wrong with it.

From cheap to costly: files and hashes, tensors against the config, shipped code against this release, the pair, a load
in a clean process where this package cannot be imported, and a canary: acceptance on a few prompts. Code of a bundle
runs only when it is this release's own, or when the caller allows other code.
"""

import difflib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from dspine_hub.checkpoints.expected import expected_tensors
from dspine_hub.checkpoints.pairing import check_pair
from dspine_hub.errors import DSpineHubError
from dspine_hub.evaluation.canary import agreement, measure_canary
from dspine_hub.findings import Report
from dspine_hub.publish.bundle import UNHASHED, Bundle
from dspine_hub.publish.shipped import AUTO_MAP, SHIPPED

# an unrelated drafter is accepted about once a round; a right one, on any text, far more often
CANARY_FLOOR = 1.3
# rounding flips a rare near tie, another dtype or device a few; a tap one layer off changes far more
CANARY_AGREEMENT = 0.95


def verify(folder: str | Path, target: str | Path | None = None, allow_custom_code: bool = False) -> Report:
    """Check a bundle folder.

    Args:
        folder (`str` or `Path`): The bundle; pull a repository first, or give its snapshot folder.
        target (`str` or `Path`, *optional*): Folder of the target. Without it the pair and the canary are not checked.
        allow_custom_code (`bool`): Run modelling code that is not this release's.

    Returns:
        [`Report`].

    Raises:
        DSpineHubError: When `folder` is no folder with a config.
    """
    return verify_bundle(Bundle.read(folder), target, allow_custom_code)


def verify_bundle(bundle: Bundle, target: str | Path | None = None, allow_custom_code: bool = False) -> Report:
    """Check a bundle that may have been read for other purposes already; as [`verify`]."""
    report = Report()
    report.extend(bundle.refused)
    check_files(report, bundle)
    try:
        config = bundle.drafter_config
    except DSpineHubError as error:
        report.add("error", "config", str(error))
        return report
    check_tensors(report, bundle, config)
    trusted = check_code(report, bundle, allow_custom_code)
    if not report.ok:
        return report
    if trusted:
        check_clean_load(report, bundle.folder)
    if target is None:
        report.add("info", "pair", "the pair and its acceptance were not checked.", "give `--target FOLDER`")
        return report
    report.extend(check_pair(bundle.folder, target))
    if report.ok and trusted:
        check_canary(report, bundle, target)
    return report


def check_files(report: Report, bundle: Bundle) -> None:
    """Compare the files with `provenance.json`."""
    try:
        listed = (bundle.provenance or {}).get("files")
    except DSpineHubError as error:
        report.add("error", "provenance", str(error), "run dspine-hub bundle")
        return
    if not isinstance(listed, dict):
        message = "`provenance.json` must list a hash of every file, got none."
        report.add("error", "provenance", message, "run dspine-hub bundle")
        return
    for name in sorted(set(listed) - set(bundle.files)):
        report.add("error", "missing-file", f"`{name}` is listed in `provenance.json` and must exist.")
    for name in sorted(set(bundle.files) - set(listed) - set(UNHASHED)):
        report.add("error", "unlisted-file", f"`{name}` must be listed in `provenance.json`, got no hash for it.")
    for name in sorted(set(listed) & set(bundle.files) - set(UNHASHED)):
        digest = bundle.files[name].sha256
        if digest != listed[name]:
            message = f"`{name}` must have the sha256 {listed[name][:12]} of `provenance.json`, got {digest[:12]}."
            report.add("error", "hash", message, "bundle the checkpoint again, or restore the file")


def check_tensors(report: Report, bundle: Bundle, config) -> None:
    """Compare index, shards, names, shapes and values with what the config asks for."""
    if not bundle.weights:
        report.add("error", "weights", f"`{bundle.folder}` must hold safetensors weights, got none.")
        return
    try:
        scans = {name: file.scan for name, file in bundle.weights.items()}
    except DSpineHubError as error:
        report.add("error", "weights", str(error))
        return
    found = {name: tensor for scan in scans.values() for name, tensor in scan.tensors.items()}
    _check_index(report, bundle, {name: file for file, scan in scans.items() for name in scan.tensors})
    expected = expected_tensors(config)
    for name in sorted(set(expected) - set(found)):
        report.add("error", "missing-tensor", f"`{name}` must be stored, shape {list(expected[name])}.")
    for name in sorted(set(found) - set(expected)):
        shape = list(found[name].shape)
        report.add("error", "unknown-tensor", f"`{name}` {shape} is no tensor of a drafter like this.")
    for name in sorted(set(found) & set(expected)):
        if found[name].shape != expected[name]:
            message = f"`{name}` must have shape {list(expected[name])}, got {list(found[name].shape)}."
            report.add("error", "shape", message)
    for scan in scans.values():
        _check_values(report, scan)


def _check_values(report: Report, scan) -> None:
    for name, bad in sorted(scan.not_finite.items()):
        count = 1
        for size in scan.tensors[name].shape:
            count *= size
        message = f"`{name}` must hold finite numbers, got {bad} of {count} that are not."
        report.add("error", "finite", message)
    if scan.flags.get("transfer_ready") is False:
        report.add("error", "transfer-space", "`transfer_ready` must be true, got false: it was never trained.")


def _check_index(report: Report, bundle: Bundle, owner: dict[str, str]) -> None:
    try:
        index = bundle.weight_map
    except DSpineHubError as error:
        report.add("error", "index", str(error))
        return
    if index is None:
        if set(owner.values()) != {"model.safetensors"}:
            message = (
                f"`model.safetensors.index.json` must name the shards, got {sorted(set(owner.values()))} without it."
            )
            report.add("error", "index", message)
        return
    if index != owner:
        wrong = sorted(set(index.items()) ^ set(owner.items()))
        report.add(
            "error", "index", f"`weight_map` must name the shard of every tensor, got {len(wrong)} differences."
        )


def check_code(report: Report, bundle: Bundle, allow_custom_code: bool) -> bool:
    """Compare the modelling code with this release's; returns whether it may run."""
    auto_map = bundle.config.get("auto_map")
    if auto_map != AUTO_MAP:
        report.add("error", "auto-map", f"`auto_map` must be {AUTO_MAP}, got {auto_map}: code comes from this folder.")
        return False
    same = True
    extra = {name for name in bundle.files if name.endswith(".py")} - set(SHIPPED)
    for name in sorted({*SHIPPED, *extra}):
        theirs, ours = bundle.text(name), SHIPPED[name].read_text(encoding="utf-8") if name in SHIPPED else ""
        if theirs == ours:
            continue
        theirs = theirs or ""
        same = False
        changes = difflib.unified_diff(
            ours.splitlines(), theirs.splitlines(), f"release/{name}", name, lineterm="", n=1
        )
        shown = "\n".join(list(changes)[:40])
        severity = "warning" if allow_custom_code else "error"
        remedy = None if allow_custom_code else "read the difference, then pass --allow-custom-code, or bundle again"
        report.add(severity, "custom-code", f"`{name}` must be this release's own, got another:\n{shown}", remedy)
    return same or allow_custom_code


def check_clean_load(report: Report, folder: Path) -> None:
    """Load in a process without this package and compare one pass of all layers, number by number."""
    import torch
    from safetensors.torch import load_file

    from dspine_hub.checkpoints.loading import load_drafter_checkpoint
    from dspine_hub.publish import clean_probe

    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "probe.safetensors"
        environment = {**os.environ, "HF_MODULES_CACHE": str(Path(scratch) / "modules"), "HF_HUB_OFFLINE": "1"}
        # -P keeps the script's own folder, full of modules of ours, off the path
        command = [sys.executable, "-P", clean_probe.__file__, str(folder.resolve()), str(result)]
        run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=scratch)
        if run.returncode:
            last = (run.stderr.strip().splitlines() or ["no message"])[-1]
            report.add("error", "clean-load", f"`{folder}` must load without this package, got: {last}")
            return
        clean = load_file(result)["probe"]
    own = clean_probe.probe(load_drafter_checkpoint(folder, torch.float32))
    # both run the same operations in the same order; only the thread count may differ
    if not torch.allclose(clean, own, rtol=1e-4, atol=1e-5):
        gap = float((clean - own).abs().max())
        report.add(
            "error", "clean-load", f"`{folder}` must compute what this package computes, got a gap of {gap:.2g}."
        )


def check_canary(report: Report, bundle: Bundle, target: str | Path) -> None:
    """Compare drafts on the canary prompts with those recorded at publishing, and acceptance with a floor."""
    try:
        canary = measure_canary(bundle.folder, target)
    except DSpineHubError as error:
        report.add("error", "canary", str(error))
        return
    advice = "look at taps, mask token and target first: text would come out right, and slowly"
    tau = canary["tau_pooled"]
    if tau < CANARY_FLOOR:
        message = f"acceptance length on the canary prompts must be at least {CANARY_FLOOR}, got {tau:.2f}."
        report.add("error", "canary", message, advice)
    recorded = ((bundle.provenance or {}).get("canary") or {}).get("drafts")
    if recorded is None:
        report.add("info", "canary", f"acceptance length on the canary prompts is {tau:.2f}; no drafts were recorded.")
        return
    share = agreement(canary["drafts"], recorded)
    if share < CANARY_AGREEMENT:
        message = f"drafts on the canary prompts must be those recorded at publishing, got {share:.0%} equal tokens."
        report.add("error", "canary", message, advice)
    else:
        message = f"acceptance length on the canary prompts is {tau:.2f}, {share:.0%} of the drafts are as recorded."
        report.add("info", "canary", message)
