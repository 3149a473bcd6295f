"""Push and pull of a large bundle: this package against plain huggingface_hub, over loopback, in one run.

`python benchmarks/push.py --gb 2 --out benchmarks/results/push.json`. The Hub is `tests/helpers/hub_server.py` in a
process of its own. Each step runs in a fresh process that reports its seconds and its peak memory above the bare
interpreter. The two clients take turns, and each starts with an empty Hub and an empty folder. Only the transfer is
compared: the bundle's own checks are left out, the hashes of push and pull are not. A time is printed only when every
pulled file has the sha256 of its source.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from report import out_option, write_report

ROOT = Path(__file__).resolve().parents[1]
REPO, TOKEN = "org/large", "hf_owner"
SHARD_BYTES = 500_000_000
CARD = "---\nlicense: apache-2.0\ntags: [dspine]\n---\n# Synthetic\n"

# what both steps share: peak resident memory of this process, whatever its parent had
MEASURE = """
import json, sys, time
def peak():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(lines["VmHWM"].split()[0]) * 1024
bare = peak()
folder, repo = sys.argv[1:]
"""
REPORT = """
print(json.dumps({"seconds": time.perf_counter() - start, "peak_bytes": peak() - bare}))
"""
STEPS = {
    ("dspine_hub", "push"): """
from dspine_hub.findings import Report
from dspine_hub.publish.push import push
start = time.perf_counter()
push(folder, repo, check=lambda path: Report())
""",
    ("dspine_hub", "pull"): """
from dspine_hub.publish.pull import pull
start = time.perf_counter()
pull(repo, folder)
""",
    ("huggingface_hub", "push"): """
from pathlib import Path
from huggingface_hub import CommitOperationAdd, HfApi
start = time.perf_counter()
api = HfApi()
api.create_repo(repo, exist_ok=True)
paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
additions = [CommitOperationAdd(path.relative_to(folder).as_posix(), str(path)) for path in paths]
api.create_commit(repo, additions, commit_message="plain")
""",
    ("huggingface_hub", "pull"): """
from huggingface_hub import snapshot_download
start = time.perf_counter()
snapshot_download(repo, local_dir=folder)
""",
}
CLIENTS = ("dspine_hub", "huggingface_hub")


def write_bundle(folder: Path, total: int):
    """Write shards of random bytes with a valid header, a card, an index and the hashes."""
    from dspine_hub.folders import file_sha256

    folder.mkdir()
    count, names = max(2, -(-total // SHARD_BYTES)), {}
    for shard in range(count):
        size = total // count
        name = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        fields = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
        header = json.dumps({f"shard.{shard}": fields}).encode()
        with (folder / name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            while size:
                size -= file.write(os.urandom(min(size, 1 << 24)))
        names[f"shard.{shard}"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "README.md").write_text(CARD)
    hashes = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
    (folder / "provenance.json").write_text(json.dumps({"files": hashes}))
    # writing it back must not slow down whoever comes first
    os.sync()


def run_step(client: str, step: str, folder: Path, environment: dict) -> dict:
    """Run one step in a fresh process."""
    code = MEASURE + STEPS[client, step] + REPORT
    command = [sys.executable, "-c", code, str(folder), REPO]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{client} {step} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def run_client(client: str, bundle: Path, place: Path) -> dict[str, dict]:
    """Push to an empty Hub, pull back, compare; return what each step reported."""
    from dspine_hub.folders import file_sha256

    command = [sys.executable, str(ROOT / "tests" / "helpers" / "hub_server.py"), "0", str(place / "server")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        fields = {"HF_ENDPOINT": server.stdout.readline().strip(), "HF_TOKEN": TOKEN, "HF_HOME": str(place / "home")}
        fields |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1"}
        environment = {**kept, **fields, "PYTHONPATH": str(ROOT)}
        steps = {"push": run_step(client, "push", bundle, environment)}
        steps["pull"] = run_step(client, "pull", place / "pulled", environment)
    finally:
        server.terminate()
        server.wait(30)
    for path in bundle.iterdir():
        if file_sha256(place / "pulled" / path.name) != file_sha256(path):
            raise SystemExit(f"{client}: `{path.name}` came back with another sha256")
    shutil.rmtree(place)
    return steps


def summarise(runs: dict[str, list[dict]], total: int) -> dict:
    """Reduce the rounds to medians with their spread, and to the ratio of the two clients' round trips."""
    report = {}
    for client in CLIENTS:
        trips = [sum(step["seconds"] for step in run.values()) for run in runs[client]]
        report[client] = {"megabytes_per_second": 2 * total / statistics.median(trips) / 1e6}
        for step in ("push", "pull"):
            seconds = sorted(run[step]["seconds"] for run in runs[client])
            report[client][f"{step}_seconds"] = {"median": statistics.median(seconds), "all": seconds}
            peak = max(run[step]["peak_bytes"] for run in runs[client])
            report[client][f"{step}_peak_megabytes_above_interpreter"] = peak / 1e6
    own, plain = (report[client]["megabytes_per_second"] for client in CLIENTS)
    return {"throughput_ratio": own / plain, **report}


@click.command()
@click.option("--gb", default=2.0, show_default=True, type=click.FloatRange(min=0.001), help="Size of the weights.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Round trips of each client.")
@out_option
def main(gb, rounds, out):
    """Compare the two clients and print one JSON object."""
    total, runs = int(gb * 1e9), {client: [] for client in CLIENTS}
    with tempfile.TemporaryDirectory() as place:
        bundle = Path(place) / "bundle"
        write_bundle(bundle, total)
        for turn in range(rounds):
            for client in CLIENTS if turn % 2 == 0 else CLIENTS[::-1]:
                work = Path(place) / client
                work.mkdir()
                runs[client].append(run_client(client, bundle, work))
                click.echo(f"round {turn + 1}, {client}: {runs[client][-1]}", err=True)
    write_report({"gigabytes": gb, "rounds": rounds, **summarise(runs, total)}, out)


if __name__ == "__main__":
    main()
