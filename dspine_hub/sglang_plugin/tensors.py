"""The tensors of a drafter's checkpoint, each of which a load must account for."""

import torch


class TensorAccount:
    """Check tensors off as they arrive, in any order.

    Args:
        expected (`dict[str, tuple[int, ...]]`): Names and shapes.
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
