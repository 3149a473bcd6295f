"""What is checked and filled in before an engine starts, from its arguments alone."""

import logging

from dspine_hub.checkpoints.pairing import check_config
from dspine_hub.checkpoints.settings import read_settings
from dspine_hub.checkpoints.sources import Source
from dspine_hub.checkpoints.targets import TargetFiles
from dspine_hub.configuration_dspine import DSpineConfig
from dspine_hub.errors import DSpineHubError

ALGORITHM = "DSPINE"
# where the DFLASH worker runs; a test of this plugin adds the CPU
DEVICES = ["cuda", "npu", "xpu"]
# SGLang's own default for this family: every request holds a block of slots
MAX_RUNNING_REQUESTS = 48

logger = logging.getLogger(__name__)


def drafter_config(raw: dict) -> DSpineConfig:
    """Read a drafter's config in this package's format or in the public trainer's.

    Args:
        raw (`dict`): `config.json`. The trainer's has the target's `model_type`, taps and mask token in
            `dflash_config`, sizes of the method in `dspine_config`.

    Returns:
        [`DSpineConfig`]: Every rule of it holds.

    Raises:
        DSpineHubError: When it is neither, or breaks a rule: a window, attention in both directions, unsorted taps.
    """
    ours = raw.get("model_type") == DSpineConfig.model_type
    if not ours and raw.get("dspine_config") is None:
        raise DSpineHubError(
            f"`config.json` must have `model_type` 'dspine' or a `dspine_config`, got {raw.get('model_type')!r} "
            "without one: this is no DSpine drafter."
        )
    return read_settings(raw, "hub" if ours else "specforge", {})[0]


def read_config(path: str, revision: str | None = None) -> DSpineConfig:
    """Read the config of a drafter in a folder or repository."""
    return drafter_config(Source(path, revision).config())


def check_pair_of(server_args) -> None:
    """Raise `DSpineHubError` unless the engine's drafter fits its target; warnings are logged.

    Args:
        server_args: SGLang's arguments, or anything with the same attributes.
    """
    path = server_args.speculative_draft_model_path
    if path is None:
        raise DSpineHubError(
            f"`--speculative-draft-model-path` must name the drafter for {ALGORITHM}, got nothing: "
            "`dspine-hub serve --target TARGET --drafter DRAFTER` writes the whole command."
        )
    raw = Source(path, server_args.speculative_draft_model_revision).config()
    if raw.get("quantization_config"):
        raise DSpineHubError(
            f"`quantization_config` of `{path}` must be absent to be served, got "
            f"{raw['quantization_config'].get('quant_method')!r}: SGLang runs drafters in the engine's dtype. Serve "
            "the bundle it was quantised from."
        )
    report = check_config(drafter_config(raw), raw, TargetFiles(server_args.model_path, server_args.revision))
    for finding in report.findings:
        if finding.severity == "warning":
            logger.warning(f"{ALGORITHM}: {finding.message}")
    report.raise_for_errors(f"`{path}` does not fit `{server_args.model_path}`")


def resolve_arguments(server_args) -> None:
    """Check and fill in what SGLang does for DFLASH only after it has settled the algorithm.

    Args:
        server_args: Only attributes are read and written: since 0.5.20 SGLang passes a recorder.
    """
    from sglang.srt.server_args import DRAFT_ATTENTION_BACKEND_CHOICES

    if server_args.device.split(":")[0] not in DEVICES:
        raise DSpineHubError(f"`--device` must be one of {DEVICES} for {ALGORITHM}, got {server_args.device!r}.")
    refused = (
        ("--pp-size", server_args.pp_size, 1, "the worker holds the whole target"),
        ("--enable-dp-attention", server_args.enable_dp_attention, False, "it was never tested with this drafter"),
    )
    for flag, value, allowed, reason in refused:
        if value != allowed:
            raise DSpineHubError(f"`{flag}` must be {allowed} for {ALGORITHM}, got {value}: {reason}.")
    server_args.speculative_num_steps = server_args.speculative_eagle_topk = 1
    if server_args.speculative_num_draft_tokens is None:
        path, revision = server_args.speculative_draft_model_path, server_args.speculative_draft_model_revision
        server_args.speculative_num_draft_tokens = read_config(path, revision).block_size
    window, block = server_args.speculative_draft_window_size, server_args.speculative_num_draft_tokens
    if window is not None and window < block:
        raise DSpineHubError(
            f"`--speculative-draft-window-size` must be at least the block's {block} rows, got {window}."
        )
    if server_args.max_running_requests is None:
        server_args.max_running_requests = MAX_RUNNING_REQUESTS
    backend = server_args.speculative_draft_attention_backend or server_args.attention_backend
    if backend is not None and backend not in DRAFT_ATTENTION_BACKEND_CHOICES:
        logger.warning(f"{ALGORITHM}: the drafter's attention backend cannot be {backend!r}; using 'flashinfer'.")
        backend = "flashinfer"
    server_args.speculative_draft_attention_backend = backend
