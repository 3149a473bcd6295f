"""What a conversion takes from the target, read from its files alone: the record, the embedding, the LM head."""

import hashlib
import json
from pathlib import Path

import torch

from dspine_hub.checkpoints.pairing import EMBEDDING_NAMES, HEAD_NAMES, chat_template_fingerprint
from dspine_hub.checkpoints.sources import Source
from dspine_hub.checkpoints.tensors import INDEX, StoredTensor, read_file
from dspine_hub.configuration_dspine import head_fingerprint, tokenizer_fingerprint
from dspine_hub.errors import DSpineHubError


class TargetFiles:
    """A target's folder or repository.

    Args:
        location (`str` or `Path`): Folder or repository.
        revision (`str`, *optional*): Branch, tag or commit of a repository.

    Raises:
        DSpineHubError: When it is neither, or has no config.
    """

    def __init__(self, location: str | Path, revision: str | None = None):
        self.source = Source(location, revision)
        whole = self.source.config()
        # multimodal targets nest the language model's facts
        self.text = {**whole, **(whole.get("text_config") or {})}

    def record(self) -> dict:
        """Describe the target as a drafter's config records it; a head that is not local is not hashed."""
        snapshot = self.source.file("config.json").parent
        # in the Hub client's cache a folder is named after its commit
        revision = snapshot.name if snapshot.parent.name == "snapshots" else None
        head = self.head_sha256() if self.source.folder is not None else None
        return _record(self.source.name, revision, self.text, self.source.tokenizer(), head)

    def head(self) -> torch.Tensor:
        """Read the LM head `[V, H]`, the embedding where they are tied."""
        return self._head().load()

    def head_sha256(self) -> str:
        """Hash the LM head as `head_fingerprint` does, a piece at a time."""
        return stored_sha256(self._head())

    def embedding_sha256(self) -> str:
        """Hash the input embedding the same way."""
        return stored_sha256(self._table("embedding", EMBEDDING_NAMES))

    def _head(self) -> StoredTensor:
        tied = self.text.get("tie_word_embeddings")
        return self._table("LM head", EMBEDDING_NAMES if tied else (*HEAD_NAMES, *EMBEDDING_NAMES))

    def _table(self, what: str, names: tuple[str, ...]) -> StoredTensor:
        tensors = {name: tensor for path in self._files(names) for name, tensor in read_file(path).items()}
        for name in names:
            if name in tensors and tensors[name].dtype in ("F32", "F16", "BF16"):
                return tensors[name]
        raise DSpineHubError(
            f"`{self.source.name}` must hold its {what} unquantised, under one of {list(names)}, got none of them: "
            "give the original target with `--target`."
        )

    def _files(self, names: tuple[str, ...]) -> list[Path]:
        """List the local weights, or fetch the one file of a repository that holds a table."""
        if self.source.folder is not None:
            return self.source.weight_files()
        owners = (self.source.read_json(INDEX) or {}).get("weight_map") or {}
        path = self.source.file(next((owners[name] for name in names if name in owners), "model.safetensors"))
        return [] if path is None else [path]


class LoadedTarget:
    """A target in memory, read alike."""

    def __init__(self, model, tokenizer=None):
        self.model, self.tokenizer = model, tokenizer
        self.text = model.config.get_text_config().to_dict()

    def record(self) -> dict:
        """As of [`TargetFiles`]."""
        return _record(
            self.model.config._name_or_path or "unnamed", None, self.text, self.tokenizer, self.head_sha256()
        )

    def head(self) -> torch.Tensor:
        """As of [`TargetFiles`]."""
        return self.model.get_output_embeddings().weight.detach().cpu()

    def head_sha256(self) -> str:
        """As of [`TargetFiles`]."""
        return head_fingerprint(self.model.get_output_embeddings().weight)

    def embedding_sha256(self) -> str:
        """As of [`TargetFiles`]."""
        return head_fingerprint(self.model.get_input_embeddings().weight)


def _record(name: str, revision: str | None, text: dict, tokenizer, head: str | None) -> dict:
    return {
        "id": name,
        "revision": revision,
        "hidden_size": text["hidden_size"],
        "num_hidden_layers": text["num_hidden_layers"],
        "vocab_size": text["vocab_size"] if tokenizer is None else len(tokenizer),
        "padded_vocab_size": text["vocab_size"],
        "tokenizer_sha256": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "lm_head_sha256": head,
        "chat_template_sha256": None if tokenizer is None else chat_template_fingerprint(tokenizer),
        "enable_thinking": None,
    }


def stored_sha256(tensor: StoredTensor) -> str:
    """Hash a stored tensor in bfloat16, a piece at a time, as `head_fingerprint` hashes one in memory."""
    digest = hashlib.sha256()
    for piece in tensor.pieces():
        digest.update(piece.to(torch.bfloat16).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_json(path: Path) -> dict:
    """Read a JSON object of the source."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DSpineHubError(f"`{path.parent}` must hold a `{path.name}`, got none.") from None
    except ValueError as error:
        raise DSpineHubError(f"`{path}` must be valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise DSpineHubError(f"`{path}` must be a JSON object, got {type(value).__name__}.")
    return value
