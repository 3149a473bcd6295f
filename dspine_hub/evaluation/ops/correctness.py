"""A round against its definition in float64: nothing is timed before it is right."""

import torch

from dspine_hub.errors import DSpineHubError
from dspine_hub.evaluation.ops.round import Drafter, Round, Shape, random_round, run_reference, run_round

BOUNDS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


def in_double(values):
    """Convert a tensor to float64 if it floats, or those of a list or named tuple."""
    if torch.is_tensor(values):
        return values.double() if values.is_floating_point() else values
    kind = type(values)
    return kind(*map(in_double, values)) if hasattr(values, "_fields") else [in_double(value) for value in values]


def check_round(drafter: Drafter, inputs: Round) -> dict:
    """Compare one round with the definition in float64.

    Returns:
        `dict`: `max_rel_err` (largest norm of the error over the norm of the result, states and scores),
        `paths_equal` (blocks whose tokens are those of float64 scores), `blocks`, and `widest_tie` (largest gap of
        float64 scores, over their root mean square, at which another token was chosen first).

    Raises:
        DSpineHubError: When the error exceeds the bound of the dtype.
    """
    written, scores, tokens, _ = run_round(drafter, inputs)
    results = [*written, scores]
    # rows of the head and of the codes are all that is read of them
    needed = torch.cat((inputs.candidates.flatten(), inputs.anchor)).unique()
    renamed = inputs._replace(
        candidates=torch.searchsorted(needed, inputs.candidates), anchor=torch.searchsorted(needed, inputs.anchor)
    )
    exact = Drafter(
        [in_double(weights) for weights in drafter.layers],
        drafter.codes[needed].double(),
        drafter.norm_weight.double(),
        drafter.head[needed].double(),
        None,
    )
    # the definition holds `[B, S, K, H]` values: request by request
    error, norm = torch.zeros(2, len(results), device=scores.device, dtype=torch.float64)
    same, ties = 0, [0.0]
    for b in range(scores.shape[0]):
        one = Round([in_double(state[b : b + 1]) for state in renamed.states], *(t[b : b + 1] for t in renamed[1:]))
        true_written, true_scores, true_tokens, _ = run_reference(exact, one)
        for i, (mine, true) in enumerate(zip(results, [*true_written, true_scores], strict=True)):
            error[i] += (mine[b : b + 1].double() - true).pow(2).sum()
            norm[i] += true.pow(2).sum()
        same += int(torch.equal(needed[true_tokens], tokens[b : b + 1]))
        ties.append(_first_gap(true_scores[0], one.candidates[0], true_tokens[0], needed, tokens[b]))
    worst = float((error / norm).sqrt().max())
    dtype = drafter.layers[0].readout.dtype
    if not worst <= BOUNDS[dtype]:
        raise DSpineHubError(
            f"`max_rel_err` must be at most {BOUNDS[dtype]:.0e} in {dtype} before anything is timed, got {worst:.2e}."
        )
    return {"max_rel_err": worst, "paths_equal": same, "blocks": scores.shape[0], "widest_tie": max(ties)}


def check_blocks(drafter: Drafter, shape: Shape, batch: int, blocks: int = 1024) -> dict:
    """Check rounds of one batch size until at least `blocks` blocks were compared; see [`check_round`]."""
    weight = drafter.layers[0].readout
    found = [
        check_round(drafter, random_round(shape, batch, weight.dtype, weight.device, seed=1000 + seed))
        for seed in range(-(-blocks // batch))
    ]
    return {
        "max_rel_err": max(one["max_rel_err"] for one in found),
        "paths_equal": sum(one["paths_equal"] for one in found) / sum(one["blocks"] for one in found),
        "blocks": sum(one["blocks"] for one in found),
        "widest_tie": max(one["widest_tie"] for one in found),
    }


def _first_gap(scores, candidates, true_tokens, needed, tokens) -> float:
    """Gap of true scores, over their root mean square, between the right token and another chosen in its place."""
    apart = (needed[true_tokens] != tokens).nonzero()
    if not apart.numel():
        return 0.0
    slot = int(apart[0])
    row = int((candidates[slot - 1] == true_tokens[slot - 1]).nonzero()[0]) if slot else 0
    right = scores[slot, row][candidates[slot] == true_tokens[slot]]
    chosen = scores[slot, row][needed[candidates[slot]] == tokens[slot]]
    return float((right - chosen) / scores.pow(2).mean().sqrt())
