"""One pass of all layers of a drafter, on numbers that only a seed decides.

Run as a script by file name it must not need this package: it hides it, loads a bundle through transformers' remote
code, and writes the result to a safetensors file. `verify` runs the same function on its own load and compares.
"""

import sys


def probe(drafter):
    """Run one block; returns the normed states, `[1, N, H]`, float32."""
    import torch

    config = drafter.config
    generator = torch.Generator().manual_seed(0)
    rows, context = config.block_size, 5
    embeds = torch.randn(1, rows, config.hidden_size, generator=generator)
    states = torch.randn(1, context, len(config.target_layer_ids) * config.hidden_size, generator=generator)
    code = torch.nn.functional.normalize(torch.randn(1, config.transfer_rank, generator=generator), dim=-1)
    mask = torch.ones(rows, context + rows, dtype=torch.bool).tril(context)[None, None]
    positions = torch.arange(context + rows)[None]
    with torch.no_grad():
        return drafter.run_blocks(
            embeds, states, positions, mask, drafter.injection.from_weights(code)
        ).last_hidden_state


def main(bundle: str, result: str) -> None:
    """Load `bundle` without this package and without Triton, and write the probe's result to `result`."""
    for name in ("dspine_hub", "triton"):
        sys.modules[name] = None
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModel

    drafter = AutoModel.from_pretrained(bundle, trust_remote_code=True, dtype=torch.float32).eval()
    save_file({"probe": probe(drafter).contiguous()}, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
