"""Draw what `make demo` prints: `python docs/demo_picture.py` writes docs/_static/demo.svg from a real run."""

from pathlib import Path

from rich.console import Console
from transformers.utils import logging

from dspine_hub.cli.demo import MINI, print_table, stream
from dspine_hub.evaluation.pair import Pair, compare

PICTURE = Path(__file__).parent / "_static" / "demo.svg"
PROMPTS = ["def fibonacci(n):\n", "class Stack:\n    def push(self, item):\n"]


def main() -> None:
    """Decode two prompts as the command does, and keep what it prints."""
    logging.disable_progress_bar()
    console = Console(record=True, width=100, force_terminal=True, color_system="truecolor", highlight=False)
    pair = Pair(MINI / "target", MINI / "drafter")
    for prompt in PROMPTS:
        stream(console, pair, prompt, 48, 0.0)
    print_table(console, compare(pair, PROMPTS, 64))
    console.save_svg(str(PICTURE), title="dspine-hub demo")


if __name__ == "__main__":
    main()
