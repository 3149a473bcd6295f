"""Trains the byte-level BPE tokenizer of the mini pair and saves it as a plain transformers tokenizer folder."""

import json
from pathlib import Path

import click
from corpus import EOS, documents, interpreter_folders, shuffled
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

ENTRIES = 8128
SPECIALS = (EOS, "<|mask|>", "<|im_start|>", "<|im_end|>")
MAX_POSITIONS = 8192

# Qwen's own split, so that runtimes which know Qwen tokenizers cut the text alike: words, single digits, punctuation.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train(texts: list[str]) -> Tokenizer:
    """Returns a tokenizer of exactly `ENTRIES` entries, the specials last, that can encode any text.

    Decoding what it encoded gives the text's NFC form back.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    ordinary = ENTRIES - len(SPECIALS)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=ordinary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    if tokenizer.get_vocab_size() != ordinary:
        raise click.ClickException(f"the text gives {tokenizer.get_vocab_size()} entries, not {ordinary}")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def save(tokenizer: Tokenizer, out: Path) -> None:
    """Writes the three files that AutoTokenizer needs, and nothing else."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    # transformers' save_pretrained would name the class after its own version; this name loads in all of them.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "mask_token": "<|mask|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


@click.command()
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--site-packages", multiple=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--max-mb", default=60.0, show_default=True, type=click.FloatRange(min=0, min_open=True))
def main(out: Path, site_packages: tuple[Path, ...], max_mb: float) -> None:
    """Train on a random sample of the corpus' documents and save the tokenizer in OUT."""
    chosen = shuffled(list(documents(list(site_packages) or interpreter_folders())), max_mb)
    save(train([document.text for document in chosen]), out)
    click.echo(f"{len(chosen)} documents, {sum(document.size for document in chosen)} bytes")


if __name__ == "__main__":
    main()
