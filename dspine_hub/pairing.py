"""What a drafter records about its target, and whether a given target is that one."""

import hashlib

from dspine_hub.configuration_dspine import head_fingerprint, tokenizer_fingerprint


def chat_template_fingerprint(tokenizer) -> str | None:
    """Hash the chat template, or return `None` for a tokenizer without one."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    text = template if isinstance(template, str) else repr(sorted(template.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def describe_target(
    target, tokenizer, target_id: str, revision: str | None = None, thinking: bool | None = None
) -> dict:
    """Describe a loaded target the way a drafter's config records it.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        target_id (`str`): Repository or folder name users will know it by.
        revision (`str`, *optional*): Commit of that repository.
        thinking (`bool`, *optional*): Whether training answers were generated with thinking; `None` where the target
            has no such mode.

    Returns:
        `dict`: One value for each of `TARGET_FIELDS`.
    """
    text = target.config.get_text_config()
    return {
        "id": target_id,
        "revision": revision,
        "hidden_size": text.hidden_size,
        "num_hidden_layers": text.num_hidden_layers,
        "vocab_size": len(tokenizer),
        "padded_vocab_size": text.vocab_size,
        "tokenizer_sha256": tokenizer_fingerprint(tokenizer),
        "lm_head_sha256": head_fingerprint(target.get_output_embeddings().weight),
        "chat_template_sha256": chat_template_fingerprint(tokenizer),
        "enable_thinking": thinking,
    }
