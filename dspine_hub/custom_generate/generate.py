"""Hand `target.generate(..., custom_generate=REPO, drafter=drafter, trust_remote_code=True)` to the drafter."""


def generate(model, input_ids=None, inputs=None, drafter=None, **kwargs):
    """Generate with `model`, drafted by `drafter`.

    Args:
        model (`PreTrainedModel`): The target, given by `generate`.
        input_ids, inputs (`torch.Tensor` of shape `[1, P]`, int64): Prompt, under either name.
        drafter (`DSpineForSpeculation`): Loaded from this repository with `AutoModel.from_pretrained`.
        kwargs: Everything else `generate` received.

    Returns:
        `torch.Tensor` of shape `[1, P + n]`, int64, or the drafter's output class with `return_dict_in_generate`.

    Raises:
        ValueError: When no drafter or no prompt was given.
    """
    if drafter is None:
        raise ValueError(
            "`drafter` must be given with this `custom_generate`, got None: pass "
            "`drafter=AutoModel.from_pretrained(REPO, trust_remote_code=True)`."
        )
    prompt = input_ids if input_ids is not None else inputs
    if prompt is None:
        raise ValueError("`input_ids` must be given, got None: embeddings alone cannot be drafted from.")
    given = {name: value for name, value in kwargs.items() if value is not None}
    return drafter.spec_generate(model, prompt, **given)
