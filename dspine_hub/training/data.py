"""Training sequences by index, and which of them belong to which step.

A step's batch is a function of the seed and the step alone, so a resumed run sees what an unbroken one would.
"""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from dspine_hub.errors import DSpineHubError
from dspine_hub.evaluation.prompts import read_lines
from dspine_hub.training.config import DataConfig, SourceConfig


class Sequences:
    """Token sequences of one length from several files, concatenated.

    Args:
        sources (`list[SourceConfig]`): The files.
        config ([`DataConfig`]): Sequence length and token dtype.
        tokenizer (`PreTrainedTokenizerBase`): Used for `.jsonl` sources and the padding token.
    """

    def __init__(self, sources: list[SourceConfig], config: DataConfig, tokenizer):
        self.length = config.sequence_length
        self._parts: list[tuple[np.ndarray, np.ndarray | None]] = []
        self._owner, self._offset = [], []
        for source in sources:
            if not source.path.exists():
                raise DSpineHubError(f"`data` must name existing files, got `{source.path}`.")
            ids, mask = _read(source.path, config, tokenizer)
            for _ in range(source.repeat):
                self._owner.append(np.full(len(ids), len(self._parts)))
                self._offset.append(np.arange(len(ids)))
            self._parts.append((ids, mask))
        self._owner, self._offset = np.concatenate(self._owner), np.concatenate(self._offset)
        if not len(self._owner):
            raise DSpineHubError(
                f"`data` must hold at least one sequence of {self.length} tokens, got none in "
                f"{[str(source.path) for source in sources]}."
            )

    def __len__(self) -> int:
        return len(self._owner)

    def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids (`[B, length]`, int64) and the loss mask (`[B, length]`, bool)."""
        ids, masks = [], []
        for index in indices:
            rows, mask = self._parts[self._owner[index]]
            ids.append(rows[self._offset[index]].astype(np.int64))
            masks.append(np.ones(self.length, bool) if mask is None else mask[self._offset[index]])
        return torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(masks))


def step_indices(count: int, batch_size: int, step: int, seed: int) -> np.ndarray:
    """Return the sequence indices of a step: consecutive pieces of one shuffle an epoch."""
    wanted = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs = wanted // count
    return np.array([_shuffle(count, seed, int(e))[i % count] for e, i in zip(epochs, wanted, strict=True)])


@lru_cache(maxsize=4)
def _shuffle(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def _read(path: Path, config: DataConfig, tokenizer) -> tuple[np.ndarray, np.ndarray | None]:
    length = config.sequence_length
    if path.suffix == ".bin":
        if path.stat().st_size == 0:
            raise DSpineHubError(f"`{path}` must hold token ids, got an empty file.")
        stream = np.memmap(path, dtype=config.token_dtype, mode="r")
        rows = len(stream) // length
        return stream[: rows * length].reshape(rows, length), None
    if path.suffix == ".npz":
        with np.load(path) as archive:
            missing = sorted({"input_ids", "loss_mask"} - set(archive))
            if missing:
                raise DSpineHubError(f"`{path}` must hold `input_ids` and `loss_mask`, got no {missing}.")
            ids, mask = archive["input_ids"], archive["loss_mask"].astype(bool)
        if ids.shape[1] < length:
            raise DSpineHubError(f"`{path}` must hold rows of at least {length} tokens, got {ids.shape[1]}.")
        return ids[:, :length], mask[:, :length]
    if path.suffix == ".jsonl":
        return _encode(path, length, tokenizer)
    raise DSpineHubError(f"`data` files must end in .bin, .npz or .jsonl, got `{path}`.")


def _encode(path: Path, length: int, tokenizer) -> tuple[np.ndarray, np.ndarray]:
    rows, masks = [], []
    for number, line in enumerate(read_lines(path), 1):
        prompt, text = _record(path, number, line)
        prompt = tokenizer(prompt)["input_ids"] if prompt else []
        answer = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        ids = [*prompt, *answer][:length]
        mask = ([False] * len(prompt) + [True] * len(answer))[:length]
        padding = length - len(ids)
        rows.append(ids + [tokenizer.eos_token_id] * padding)
        masks.append(mask + [False] * padding)
    return np.array(rows, dtype=np.int64).reshape(-1, length), np.array(masks, dtype=bool).reshape(-1, length)


def _record(path: Path, number: int, line: str) -> tuple[str, str]:
    """Read one line as `(prompt, text to learn)`."""
    try:
        record = json.loads(line)
        pair = (record["prompt"], record["completion"]) if "prompt" in record else ("", record["text"])
    except (json.JSONDecodeError, KeyError, TypeError):
        pair = (None, None)
    if not all(isinstance(part, str) for part in pair):
        raise DSpineHubError(
            f"`{path}` line {number} must be a JSON object with `text`, or `prompt` and `completion`, all strings, "
            f"got {line[:80]!r}."
        )
    return pair
