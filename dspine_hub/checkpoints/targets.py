"""What a drafter needs to know of its target: the record in its config, the embedding, the LM head.

[`TargetFiles`] reads a folder or repository, [`LoadedTarget`] a model in memory; both say the same.
"""

import hashlib
from pathlib import Path

from dspine_hub.checkpoints.sources import Source
from dspine_hub.checkpoints.tensors import INDEX, StoredTensor, read_file
from dspine_hub.configuration_dspine import head_fingerprint, tokenizer_fingerprint
from dspine_hub.errors import DSpineHubError

# where targets keep the matrix their logits come from; a tied head is the embedding
HEAD_NAMES = ("lm_head.weight", "model.language_model.lm_head.weight")
EMBEDDING_NAMES = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")


def text_config(config: dict) -> dict:
    """Return the language model's facts; multimodal targets nest them."""
    return {**config, **(config.get("text_config") or {})}


def chat_template_fingerprint(tokenizer) -> str | None:
    """Hash the chat template, or return `None` for a tokenizer without one."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    text = template if isinstance(template, str) else repr(sorted(template.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def target_record(
    target_id: str,
    text: dict,
    tokenizer,
    lm_head_sha256: str | None,
    revision: str | None = None,
    thinking: bool | None = None,
) -> dict:
    """Describe a target the way a drafter's config records it.

    Args:
        target_id (`str`): Repository or folder name users will know it by.
        text (`dict`): The language model's config.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Its tokenizer.
        lm_head_sha256 (`str`, *optional*): Hash of its LM head, as of `head_fingerprint`.
        revision (`str`, *optional*): Commit of that repository.
        thinking (`bool`, *optional*): Whether training answers were generated with thinking; `None` where the target
            has no such mode.

    Returns:
        `dict`: One value for each of `TARGET_FIELDS`.
    """
    return {
        "id": target_id,
        "revision": revision,
        "hidden_size": text["hidden_size"],
        "num_hidden_layers": text["num_hidden_layers"],
        "vocab_size": text["vocab_size"] if tokenizer is None else len(tokenizer),
        "padded_vocab_size": text["vocab_size"],
        "tokenizer_sha256": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "lm_head_sha256": lm_head_sha256,
        "chat_template_sha256": None if tokenizer is None else chat_template_fingerprint(tokenizer),
        "enable_thinking": thinking,
    }


class TargetFiles:
    """A target's folder or repository.

    Args:
        location (`str`, `Path` or `Source`): Folder or repository.
        revision (`str`, *optional*): Branch, tag or commit of a repository.

    Raises:
        DSpineHubError: When it is neither, or has no config.
    """

    def __init__(self, location: str | Path | Source, revision: str | None = None):
        self.source = location if isinstance(location, Source) else Source(location, revision)
        self.config = self.source.config()
        self.text = text_config(self.config)

    def record(self) -> dict:
        """Describe the target as a drafter's config records it; a head that is not local is not hashed."""
        snapshot = self.source.file("config.json").parent
        # in the Hub client's cache a folder is named after its commit
        revision = snapshot.name if snapshot.parent.name == "snapshots" else None
        head = self.head_sha256() if self.source.folder is not None else None
        return target_record(self.source.name, self.text, self.source.tokenizer(), head, revision)

    def head(self):
        """Read the LM head, a `torch.Tensor` of shape `[V, H]`; the embedding where they are tied."""
        return self._table("LM head", self.head_names).load()

    def head_sha256(self) -> str:
        """Hash the LM head as `head_fingerprint` does, a piece at a time."""
        return stored_sha256(self._table("LM head", self.head_names))

    def embedding_sha256(self) -> str:
        """Hash the input embedding the same way."""
        return stored_sha256(self._table("embedding", EMBEDDING_NAMES))

    @property
    def head_names(self) -> tuple[str, ...]:
        """Names under which the LM head may be stored, the likeliest first."""
        return EMBEDDING_NAMES if self.text.get("tie_word_embeddings") else (*HEAD_NAMES, *EMBEDDING_NAMES)

    def head_header(self) -> StoredTensor | None:
        """Return where and how the LM head is stored, `None` under no known name; of a repository by ranges."""
        tensors = self.source.tensors()
        return next((tensors[name] for name in self.head_names if name in tensors), None)

    def _table(self, what: str, names: tuple[str, ...]) -> StoredTensor:
        tensors = self._local_tensors(names)
        for name in names:
            if name in tensors and tensors[name].dtype in ("F32", "F16", "BF16"):
                return tensors[name]
        raise DSpineHubError(
            f"`{self.source.name}` must hold its {what} unquantised, under one of {list(names)}, got none of them: "
            "give the original target with `--target`."
        )

    def _local_tensors(self, names: tuple[str, ...]) -> dict[str, StoredTensor]:
        """List the tensors of a folder, or of the one file of a repository that holds a table, which is fetched."""
        if self.source.folder is not None:
            return self.source.tensors()
        owners = (self.source.read_json(INDEX) or {}).get("weight_map") or {}
        path = self.source.file(next((owners[name] for name in names if name in owners), "model.safetensors"))
        return {} if path is None else read_file(path)


class LoadedTarget:
    """A target in memory, read alike.

    Args:
        model (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Its tokenizer.
    """

    def __init__(self, model, tokenizer=None):
        self.model, self.tokenizer = model, tokenizer
        self.text = model.config.get_text_config().to_dict()

    def record(self, target_id: str | None = None, thinking: bool | None = None) -> dict:
        """Describe the target as a drafter's config records it, by its own name or another."""
        name = target_id or self.model.config._name_or_path or "unnamed"
        return target_record(name, self.text, self.tokenizer, self.head_sha256(), thinking=thinking)

    def head(self):
        """As of [`TargetFiles`]."""
        return self.model.get_output_embeddings().weight.detach().cpu()

    def head_sha256(self) -> str:
        """As of [`TargetFiles`]."""
        return head_fingerprint(self.model.get_output_embeddings().weight)

    def embedding_sha256(self) -> str:
        """As of [`TargetFiles`]."""
        return head_fingerprint(self.model.get_input_embeddings().weight)


def stored_sha256(tensor: StoredTensor) -> str:
    """Hash a stored tensor in bfloat16, a piece at a time, as `head_fingerprint` hashes one in memory."""
    import torch

    digest = hashlib.sha256()
    for piece in tensor.pieces():
        digest.update(piece.to(torch.bfloat16).view(torch.uint8).numpy().data)
    return digest.hexdigest()
