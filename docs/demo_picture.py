"""Draw what `make demo` prints: `python docs/demo_picture.py` writes docs/_static/demo.svg from a real run."""

import re
from pathlib import Path

from rich.console import Console
from transformers.utils import logging

from dspine_hub.cli.demo import MINI, PROMPTS, print_table, stream
from dspine_hub.evaluation.pair import Pair, compare
from dspine_hub.evaluation.prompts import read_prompts

PICTURE = Path(__file__).parent / "_static" / "demo.svg"
# the text shown; the table is of all prompts of the command
SHOWN = 3
# rich names fonts of a server: a picture that fetches nothing takes the reader's own
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def main() -> None:
    """Decode the command's own prompts, and keep what it prints of one and of the table."""
    logging.disable_progress_bar()
    console = Console(record=True, width=90, force_terminal=True, color_system="truecolor", highlight=False)
    pair, held_out = Pair(MINI / "target", MINI / "drafter"), read_prompts(MINI / "heldout.jsonl")
    prompts = held_out[:: len(held_out) // PROMPTS][:PROMPTS]
    stream(console, pair, prompts[SHOWN], 64, 0.0)
    print_table(console, compare(pair, prompts, 64))
    PICTURE.write_text(FONTS.sub("", console.export_svg(title="dspine-hub demo")))


if __name__ == "__main__":
    main()
