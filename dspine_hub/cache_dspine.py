"""Keys and values of the context rows a drafter has read: the only state it carries from round to round."""

import torch


class DSpineContextCache:
    """Keys and values of committed context rows, a buffer a layer that grows by doubling.

    `update` appends rows and returns the whole; `crop(-k)` takes the last `k` rows back, which is how block rows leave
    after every pass. Both follow the signatures of transformers' caches.
    """

    def __init__(self):
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._lengths: list[int] = []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Count the rows a layer holds."""
        return self._lengths[layer_idx] if layer_idx < len(self._lengths) else 0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows of shape `[B, kv_heads, n, head_dim]` and return all rows of the layer."""
        if layer_idx == len(self._keys):
            self._keys.append(keys.new_empty(keys.shape[:2] + (0,) + keys.shape[3:]))
            self._values.append(values.new_empty(values.shape[:2] + (0,) + values.shape[3:]))
            self._lengths.append(0)
        start, end = self._lengths[layer_idx], self._lengths[layer_idx] + keys.shape[2]
        if end > self._keys[layer_idx].shape[2]:
            for buffers in (self._keys, self._values):
                old = buffers[layer_idx]
                grown = old.new_empty(old.shape[:2] + (max(end, 2 * old.shape[2]),) + old.shape[3:])
                grown[:, :, :start] = old[:, :, :start]
                buffers[layer_idx] = grown
        self._keys[layer_idx][:, :, start:end] = keys
        self._values[layer_idx][:, :, start:end] = values
        self._lengths[layer_idx] = end
        return self._keys[layer_idx][:, :, :end], self._values[layer_idx][:, :, :end]

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` rows of every layer; the argument must not be positive."""
        if tokens_to_remove > 0 or -tokens_to_remove > self.get_seq_length():
            raise ValueError(
                f"`tokens_to_remove` must lie in [-{self.get_seq_length()}, 0] (negative: rows taken off the end), "
                f"got {tokens_to_remove}."
            )
        self._lengths = [length + tokens_to_remove for length in self._lengths]


__all__ = ["DSpineContextCache"]
