"""Let the target continue pieces of its training text: the drafter learns from the target's own words.

`python regenerate.py --target DIR --tokens train.bin --out regenerated.npz` writes rows of `--length` tokens: a prompt
taken from the token stream and the target's greedy continuation. `input_ids` is `[n, length]`, `loss_mask` is true on
the continuation up to and including the first end token.
"""

from pathlib import Path

import click
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@click.command()
@click.option("--target", required=True, type=click.Path(exists=True, file_okay=False))
@click.option("--tokens", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--rows", default=16384, show_default=True)
@click.option("--batch-size", default=4096, show_default=True)
@click.option("--length", default=512, show_default=True)
@click.option("--prompt-lengths", default="32,96,192", show_default=True, help="Used in turn, one a batch.")
@click.option("--seed", default=0, show_default=True)
def main(target, tokens, out, rows, batch_size, length, prompt_lengths, seed):
    """Write the target's greedy continuations of random pieces of a token stream."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(target)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).to(device).eval()
    stream = np.memmap(tokens, dtype=np.uint16, mode="r")
    random = np.random.default_rng(seed)
    lengths = [int(value) for value in prompt_lengths.split(",")]
    all_ids, all_masks = [], []
    for number, start in enumerate(range(0, rows, batch_size)):
        size = lengths[number % len(lengths)]
        count = min(batch_size, rows - start)
        offsets = random.integers(0, len(stream) - size, count)
        prompts = np.stack([stream[offset : offset + size] for offset in offsets]).astype(np.int64)
        with torch.no_grad():
            ids = model.generate(
                torch.from_numpy(prompts).to(device),
                attention_mask=torch.ones(prompts.shape, dtype=torch.long, device=device),
                max_new_tokens=length - size,
                min_new_tokens=length - size,
                do_sample=False,
            )
        ids = ids.cpu().numpy()
        ended = np.cumsum(ids[:, size:] == tokenizer.eos_token_id, axis=1)
        mask = np.zeros(ids.shape, dtype=bool)
        mask[:, size:] = (ended == 0) | ((ended == 1) & (ids[:, size:] == tokenizer.eos_token_id))
        all_ids.append(ids.astype(np.uint16))
        all_masks.append(mask)
        click.echo(f"{start + count} of {rows} rows")
    np.savez(out, input_ids=np.concatenate(all_ids), loss_mask=np.concatenate(all_masks))


if __name__ == "__main__":
    main()
