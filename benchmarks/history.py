"""Earlier results, read from the history of `benchmarks/results/`: `python benchmarks/history.py` writes history.json.

A result is replaced by the next; what it said stays in git. This file keeps the figures that are compared over time
beside the commit they were measured on, for readers without the history at hand.
"""

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def git(*arguments: str) -> str:
    """Run git in the checkout and return what it prints."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


def versions(name: str) -> list[tuple[str, dict]]:
    """Return every committed version of a result with the day of its commit, oldest first."""
    path = f"benchmarks/results/{name}"
    lines = git("log", "--reverse", "--format=%H %cs", "--", path).splitlines()
    found = []
    for line in lines:
        commit, day = line.split()
        shown = subprocess.run(["git", "-C", str(ROOT), "show", f"{commit}:{path}"], capture_output=True, text=True)
        if shown.returncode == 0:
            found.append((day, json.loads(shown.stdout)))
    return found


def operations(result: dict) -> dict:
    """Microseconds of a round by batch size."""
    return {str(row["batch"]): row["ours_us"] for row in result["rows"]}


def rounds(result: dict) -> dict:
    """Time of a round over DFlash's, by batch size."""
    return {str(row["batch"]): row["dspine_over_dflash"] for row in result.get("round_us", [])}


# result file -> what is followed of it
FOLLOWED = {"ops-h200.json": ("ops_us", operations), "sglang-h200.json": ("round_over_dflash", rounds)}


def collect() -> dict[str, list[dict]]:
    """Read all of it: figure -> one entry a measured commit, oldest first."""
    history = {}
    for name, (figure, read) in FOLLOWED.items():
        entries = {}
        for day, result in versions(name):
            origin = result.get("origins", {}).get("round_us", result)
            values = read(result)
            if values and origin.get("commit"):
                entries[origin["commit"]] = {"date": day, "commit": origin["commit"], "values": values}
        history[figure] = list(entries.values())
    return history


if __name__ == "__main__":
    (RESULTS / "history.json").write_text(json.dumps(collect(), indent=2) + "\n")
