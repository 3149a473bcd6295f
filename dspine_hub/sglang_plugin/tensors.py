"""The tensors of a drafter's checkpoint, each of which a load must account for."""

import torch

from dspine_hub.configuration_dspine import DSpineConfig


def expected_tensors(config: DSpineConfig) -> dict[str, tuple[int, ...]]:
    """Name every tensor of a checkpoint with its shape."""
    hidden, rank, size = config.hidden_size, config.transfer_rank, config.message_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "injection.message.weight": (size, rank),
        "injection.receiver_gate.weight": (size, rank),
        "injection.predecessor_gate.weight": (size, rank),
        "injection.bias": (size,),
        "transfer_ready": (),
    }
    linear = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (config.intermediate_size, hidden),
        "mlp.up_proj": (config.intermediate_size, hidden),
        "mlp.down_proj": (hidden, config.intermediate_size),
    }
    norms = {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    norms |= {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    for layer in range(config.num_hidden_layers):
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in linear.items()}
        shapes |= {f"layers.{layer}.{name}.weight": (width,) for name, width in norms.items()}
        shapes[f"injection.readouts.{layer}.weight"] = (rank, hidden)
        shapes[f"injection.writes.{layer}.weight"] = (hidden, size)
        if config.attention_bias:
            attention = {name: shape for name, shape in linear.items() if name.startswith("self_attn.")}
            shapes |= {f"layers.{layer}.{name}.bias": shape[:1] for name, shape in attention.items()}
    if config.transfer_storage == "codes":
        return {**shapes, "transfer_codes": (config.vocab_size, rank)}
    basis = {"mean": (hidden,), "directions": (rank, hidden), "eigenvalues": (rank,)}
    return {**shapes, **{f"transfer_basis.{name}": shape for name, shape in basis.items()}}


class TensorAccount:
    """Check tensors off as they arrive, in any order.

    Args:
        expected (`dict[str, tuple[int, ...]]`): Names and shapes, as [`expected_tensors`] gives them.
    """

    def __init__(self, expected: dict[str, tuple[int, ...]]):
        self._expected = expected
        self._open = set(expected)

    def take(self, name: str, tensor: torch.Tensor) -> str:
        """Check one tensor off and return its name without a trainer's `model.` in front.

        Raises:
            ValueError: When it is no tensor of such a drafter, came before, or has another shape.
        """
        name = name.removeprefix("model.")
        if name not in self._expected:
            raise ValueError(
                f"`{name}` {list(tensor.shape)} is no tensor of a drafter with this config: `dspine-hub verify` "
                "lists what a checkpoint must hold."
            )
        if name not in self._open:
            raise ValueError(f"`{name}` must be stored once, got it twice.")
        if tuple(tensor.shape) != self._expected[name]:
            raise ValueError(f"`{name}` must have shape {list(self._expected[name])}, got {list(tensor.shape)}.")
        self._open.remove(name)
        return name

    def close(self) -> None:
        """Raise `ValueError` unless every tensor has arrived."""
        if self._open:
            missing = sorted(self._open)
            shown = ", ".join(f"`{name}` {list(self._expected[name])}" for name in missing[:8])
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise ValueError(f"the drafter's checkpoint must hold {shown}{more}, got none: it is incomplete.")
