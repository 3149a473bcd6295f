"""Drafting as a CUDA graph: one captured pass a batch size, over context buffers that never move.

A round brings at most `N` new context rows, the rows just committed, so the graph reads `N` of them and a count; rows
past the count are written behind the buffers' end, where the mask shows them to nobody. A prompt is longer: its rows
but the last `N` are appended in front of the first replay, by the same projections.
"""

import dataclasses

import torch

from .cache_dspine import DSpineContextCache


class GraphContextCache(DSpineContextCache):
    """Context rows in the buffers a [`CompiledDraft`] captured; past its end it grows like any other.

    Args:
        compiled ([`CompiledDraft`]): Whose buffers these are.
        keys, values (`list[torch.Tensor]` of `L` tensors of shape `[B, kv_heads, max_length + N, head_dim]`): Buffers.
    """

    def __init__(self, compiled: "CompiledDraft", keys: list[torch.Tensor], values: list[torch.Tensor]):
        super().__init__()
        self.compiled = compiled
        self._keys, self._values, self._lengths = list(keys), list(values), [0] * len(keys)
        self.spent = False

    def fits(self, rows: int) -> bool:
        """Tell whether `rows` new context rows and a block fit the buffers; raises once they are another request's.

        Raises:
            ValueError: When `new_cache` gave the buffers to a later request.
        """
        if self.spent:
            raise ValueError(
                "`cache` must be the one `new_cache` returned last, got an earlier one: after `compile_draft` all "
                "caches share the graph's buffers, so requests are drafted one after another."
            )
        compiled = self.compiled
        return self.get_seq_length() + rows + compiled.block <= compiled.max_length

    def advance(self, rows: int) -> None:
        """Count rows the graph has written."""
        self._lengths = [length + rows for length in self._lengths]


class _CapturedRows:
    """The cache one captured pass sees: writes where the device says, returns whole buffers."""

    def __init__(self, keys, values, rows):
        self.keys, self.values, self.rows = keys, values, rows

    def update(self, keys, values, layer_idx, *args, **kwargs):
        self.keys[layer_idx].index_copy_(2, self.rows, keys)
        self.values[layer_idx].index_copy_(2, self.rows, values)
        return self.keys[layer_idx], self.values[layer_idx]


class _Capture:
    """Inputs, outputs and graph of one batch size."""

    def __init__(self, drafter, tables, max_length: int, batch: int, capture: bool):
        config, device, dtype = drafter.config, drafter.device, drafter.fc.weight.dtype
        self.block = config.block_size
        rows = (batch, config.num_key_value_heads, max_length + self.block, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.keys = [torch.zeros(rows, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.zeros(rows, dtype=dtype, device=device) for _ in layers]
        self.context = torch.zeros(batch, self.block, drafter.fc.in_features, dtype=dtype, device=device)
        self.anchor = torch.zeros(batch, dtype=torch.long, device=device)
        self.temperature = torch.zeros(batch, device=device)
        self.uniforms = torch.zeros(batch, self.block - 1, device=device)
        # rows already in the buffers, and rows of `context` that count
        self.extent = torch.tensor([0, 1], device=device)
        self.drafter, self.tables, self.max_length, self.graph = drafter, tables, max_length, None
        if capture:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self.run()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.draft = self.run()

    def run(self):
        """Draft from the input buffers; static shapes, nothing read back."""
        past, count = self.extent
        rows = torch.arange(self.block, device=self.anchor.device)
        block = past + count + rows
        behind = torch.where(rows < count, past + rows, self.max_length + rows)
        mask = torch.arange(self.max_length + self.block, device=rows.device) <= block[:, None]
        positions = torch.cat((past + rows, block))[None].expand(self.anchor.shape[0], -1)
        drafter = self.drafter
        output = drafter.run_blocks(
            drafter.bound().embedding(drafter.block_ids(self.anchor)),
            self.context,
            positions,
            mask[None, None],
            drafter.injection.from_tables(self.tables, self.anchor),
            _CapturedRows(self.keys, self.values, torch.cat((behind, block))),
        )
        return drafter.choose(output, self.anchor, self.temperature, self.uniforms, self.tables)

    def replay(self, past: int, context, anchor, temperature, uniforms):
        """Fill the inputs and draft."""
        count = context.shape[1]
        self.context[:, :count].copy_(context)
        self.anchor.copy_(anchor)
        self.temperature.copy_(temperature)
        self.uniforms.copy_(uniforms)
        self.extent.copy_(torch.tensor([past, count]), non_blocking=True)
        if self.graph is None:
            self.draft = self.run()
        else:
            self.graph.replay()
        # the next replay overwrites the graph's outputs
        return dataclasses.replace(
            self.draft,
            **{field.name: getattr(self.draft, field.name).clone() for field in dataclasses.fields(self.draft)},
        )


class CompiledDraft:
    """Captured drafting for some batch sizes; made by `compile_draft` of a drafter.

    Args:
        drafter (`DSpineForSpeculation`): Bound drafter.
        max_length (`int`): Context rows plus block the buffers hold.
        batch_sizes (`tuple[int]`): Batches to capture.
        capture (`bool`): `False` runs the same static pass without a graph, on any device.

    Raises:
        ValueError: When `max_length` does not hold a block, or the drafter is unbound.
    """

    def __init__(self, drafter, max_length: int, batch_sizes: tuple[int, ...], capture: bool = True):
        self.block = drafter.config.block_size
        if max_length <= self.block:
            raise ValueError(f"`max_length` must exceed `block_size` = {self.block}, got {max_length}.")
        self.drafter, self.max_length, self.batch_sizes = drafter, max_length, tuple(batch_sizes)
        self.tables = drafter.prepare()
        self._caches: dict[int, GraphContextCache] = {}
        with torch.no_grad():
            self._captures = {
                batch: _Capture(drafter, self.tables, max_length, batch, capture) for batch in self.batch_sizes
            }

    def new_cache(self, batch: int) -> GraphContextCache:
        """Hand out the buffers of a batch size, emptied; the cache given out before is spent."""
        if batch in self._caches:
            self._caches[batch].spent = True
        capture = self._captures[batch]
        self._caches[batch] = GraphContextCache(self, capture.keys, capture.values)
        return self._caches[batch]

    def __call__(self, context, anchor, temperature, uniforms, cache: GraphContextCache):
        """Draft as `draft` does, with a `cache` that `fits`."""
        ahead = context.shape[1] - self.block
        if ahead > 0:
            self.drafter.append_context(context[:, :ahead], cache)
            context = context[:, ahead:]
        draft = self._captures[anchor.shape[0]].replay(cache.get_seq_length(), context, anchor, temperature, uniforms)
        cache.advance(context.shape[1])
        return draft


__all__ = ["CompiledDraft", "GraphContextCache"]
