"""The command that serves a pair, written out so that nothing about it is hidden."""

import importlib.metadata
import sys
from types import SimpleNamespace

from dspine_hub.errors import DSpineHubError
from dspine_hub.sglang_plugin import SUPPORTED, is_supported

INSTALL = 'pip install "dspine-hub[sglang]"'
# flags this command sets from its own options
OWN_FLAGS = {
    "--model-path": "--target",
    "--model": "--target",
    "--speculative-draft-model-path": "--drafter",
    "--speculative-draft-model": "--drafter",
    "--speculative-algorithm": "--drafter",
}


def installed_sglang() -> str | None:
    """Return the version of the installed SGLang, or `None`."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def require_sglang() -> None:
    """Raise `DSpineHubError` unless a tested SGLang is installed."""
    version = installed_sglang()
    if version is None:
        raise DSpineHubError(f"`sglang` must be installed to serve, got none: run `{INSTALL}`.")
    if not is_supported(version):
        raise DSpineHubError(f"`sglang` must be {SUPPORTED}, got {version}: run `{INSTALL}`.")


def launch_command(target: str, drafter: str, flags: list[str] | tuple[str, ...] = ()) -> list[str]:
    """Write the command that serves a pair, after checking that it is one.

    Args:
        target, drafter (`str`): Folders or repositories.
        flags (`list[str]`): Flags of SGLang's server; they win over what is filled in here.

    Returns:
        `list[str]`: Interpreter, module and arguments.

    Raises:
        DSpineHubError: When the pair does not fit, or a flag contradicts `target` or `drafter`.
    """
    from dspine_hub.sglang_plugin.startup import ALGORITHM, check_pair_of, read_config

    for flag, option in OWN_FLAGS.items():
        if _value(flags, flag) is not None:
            raise DSpineHubError(f"`{flag}` must not be given here, got {_value(flags, flag)!r}: `{option}` sets it.")
    revision = _value(flags, "--speculative-draft-model-revision")
    arguments = {"model_path": target, "revision": _value(flags, "--revision")}
    arguments |= {"speculative_draft_model_path": drafter, "speculative_draft_model_revision": revision}
    check_pair_of(SimpleNamespace(**arguments))
    config = read_config(drafter, revision)
    own = ["--model-path", target, "--speculative-algorithm", ALGORITHM, "--speculative-draft-model-path", drafter]
    defaults = {
        # a drafter inherits the target's quantisation otherwise
        "--speculative-draft-model-quantization": "unquant",
        "--speculative-num-draft-tokens": config.block_size,
    }
    length = _context_length(target, arguments["revision"], flags)
    if length is not None and length > config.max_position_embeddings:
        # beyond the distances it was trained on a drafter sees its newest rows only
        defaults["--speculative-draft-window-size"] = config.max_position_embeddings
    for flag, value in defaults.items():
        if _value(flags, flag) is None:
            own += [flag, str(value)]
    return [sys.executable, "-m", "sglang.launch_server", *own, *flags]


def _context_length(target: str, revision: str | None, flags) -> int | None:
    from dspine_hub.checkpoints.targets import TargetFiles

    given = _value(flags, "--context-length")
    if given is not None and given.isdigit():
        return int(given)
    return TargetFiles(target, revision).text.get("max_position_embeddings")


def _value(flags, name: str) -> str | None:
    """Return the value of a flag written `--name value` or `--name=value`, `""` at the end of the line."""
    for index, flag in enumerate(flags):
        if flag == name:
            return flags[index + 1] if index + 1 < len(flags) else ""
        if flag.startswith(f"{name}="):
            return flag.partition("=")[2]
    return None
