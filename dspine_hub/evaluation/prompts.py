"""Prompts from a file."""

import json
from pathlib import Path

from dspine_hub.errors import DSpineHubError


def read_lines(path: Path) -> list[str]:
    """Split a `.jsonl` file at newlines alone: JSON strings may hold other separators as they are."""
    text = path.read_text(encoding="utf-8").rstrip("\n")
    return text.split("\n") if text else []


def read_prompts(path: Path) -> list[str]:
    """Read a `.jsonl` of `{"prompt": ...}`.

    Raises:
        DSpineHubError: When the file is missing, a line is no such object, or there is none.
    """
    try:
        lines = read_lines(Path(path))
    except (FileNotFoundError, IsADirectoryError):
        raise DSpineHubError(f"`prompts` must name a .jsonl file, got `{path}`, which is no file.") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompt = json.loads(line)["prompt"]
        except (json.JSONDecodeError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str) or not prompt:
            raise DSpineHubError(
                f'`{path}` line {number} must be a JSON object like {{"prompt": "..."}}, got {line!r}.'
            )
        prompts.append(prompt)
    if not prompts:
        raise DSpineHubError(f"`{path}` must hold at least one prompt, got an empty file.")
    return prompts
