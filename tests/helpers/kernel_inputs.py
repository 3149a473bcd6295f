"""Random inputs of the operations, and forms of them that several tests compare."""

import torch

from dspine_hub.kernels_dspine import BackboneLogits, InjectionWeights, transfer_tables, transition_scores_reference

# float32 sums of at most 64 terms of order 1 lose a few ulps (6e-8 each); the message form divides two such sums, and
# its quadratic term squares the message, so 1e-4 of the largest score leaves about a factor 10
FLOAT32 = 1e-4


def weights(R, H, M, V, seed=0):
    """Random weights in the order of the kernels' arguments, scaled so that gates and messages are of order 1."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, scale):
        return torch.randn(*shape, generator=g) * scale

    return {
        "codes": torch.nn.functional.normalize(normal(V, R, scale=1.0), dim=-1).to(torch.bfloat16),
        "readout": normal(R, H, scale=H**-0.5),
        "write": normal(H, M, scale=M**-0.5),
        "message": normal(M, R, scale=R**-0.5),
        "receiver_gate": normal(M, R, scale=R**-0.5),
        "predecessor_gate": normal(M, R, scale=R**-0.5),
        "bias": normal(M, scale=0.5),
        "norm_weight": 1 + normal(H, scale=0.2),
        "norm_eps": 1e-6,
        "head_weight": normal(V, H, scale=0.3),
    }


def injection_weights(w):
    return InjectionWeights(*(w[name] for name in InjectionWeights._fields))


def tables_of(w, before=(), **kwargs):
    """Prepare tables of one layer, behind those of layers `before` it."""
    return transfer_tables(
        [*before, injection_weights(w)], w["codes"], w["norm_weight"], w["norm_eps"], w["head_weight"], **kwargs
    )


def hidden_scores(state, candidates, anchor, codes, norm_weight, norm_eps, head_weight, **layer):
    """Scores by the definition."""
    weights = injection_weights(layer)
    return transition_scores_reference(state, candidates, anchor, codes, weights, norm_weight, norm_eps, head_weight)


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def backbone_logits(injected, candidates, norm_weight, norm_eps, head_weight):
    """The backbone's logits of given candidates, in float32, and what it wrote."""
    written = injected.hidden[:, 1:].float()
    rows = head_weight.float()[candidates]
    logits = torch.matmul(rows, rms_norm(written, norm_weight.float(), norm_eps)[..., None]).squeeze(-1)
    return BackboneLogits(logits, injected.message[:, 1:], written.norm(dim=-1))


def score_inputs(B, S, K, V, H, R, M, seed=0):
    g = torch.Generator().manual_seed(100 + seed)
    inputs = {
        "state": 3 * torch.randn(B, S, H, generator=g),
        "candidates": torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(B * S)]).view(B, S, K),
        "anchor": torch.randint(V, (B,), generator=g),
    }
    return {**inputs, **weights(R, H, M, V, seed)}


def naive_walk(scores, candidates, temperature, uniforms):
    """Walk one request, in Python numbers."""
    tokens, rows, row = [], [], 0
    for slot in range(len(candidates)):
        values = scores[slot][row].double()
        if temperature == 0:
            row = int(values.argmax())
            q = torch.zeros(len(values), dtype=torch.float64)
            q[row] = 1
        else:
            q = torch.softmax(values / temperature, dim=0)
            row, total = 0, float(q[0])
            while row < len(q) - 1 and total <= float(uniforms[slot]):
                row += 1
                total += float(q[row])
        tokens.append(int(candidates[slot][row]))
        rows.append(q)
    return tokens, torch.stack(rows)
