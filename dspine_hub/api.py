"""Functions users call from `dspine_hub` itself."""


def generate(target, drafter, input_ids, **kwargs):
    """Generate with a target, drafted by a drafter; the same loop as `drafter.spec_generate`.

    Args:
        target (`PreTrainedModel`): The target.
        drafter (`DSpineForSpeculation`): Its drafter, of this package or loaded as remote code.
        input_ids (`torch.Tensor` of shape `[1, P]`, int64): Prompt.
        kwargs: As `spec_generate` takes: `max_new_tokens`, `temperature`, `stop_token_ids`, `streamer`,
            `return_dict_in_generate`, and whatever `target.generate` takes.

    Returns:
        `torch.Tensor` of shape `[1, P + n]`, int64, or `DSpineGenerateOutput` with `return_dict_in_generate=True`.

    Raises:
        ValueError: When the drafter belongs to another target, or the request cannot be decoded.
    """
    return drafter.spec_generate(target, input_ids, **kwargs)
