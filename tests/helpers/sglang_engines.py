"""SGLang releases that run on a CPU, each in a folder of its own that goes in front of `sys.path`.

`python tests/helpers/sglang_engines.py FOLDER OVERLAYS` installs them, `--only 0.5.23` one. `FOLDER/venv` holds what
they share and sees the packages of this environment (torch, transformers, this package); `FOLDER/<version>` holds one
release alone, without the GPU packages it asks for. Each runs with the transformers release it pins, from OVERLAYS.
"""

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent

# release -> the transformers and xgrammar releases it pins
ENGINES = {"0.5.19": ("5.12.1", "0.2.1"), "0.5.21": ("5.12.1", "0.2.1"), "0.5.23": ("5.19.0", "0.2.7")}

SHARED = (
    *("aiohttp", "apache-tvm-ffi==0.1.11", "dill", "einops", "fastapi", "gguf", "ipython", "jsonschema", "loguru"),
    *("msgspec", "nvidia-ml-py", "openai", "orjson", "partial_json_parser", "pillow", "prometheus-client", "psutil"),
    *("pybase64", "python-multipart", "pyzmq", "requests", "sentencepiece==0.2.1", "setproctitle", "setuptools"),
    *("soundfile", "starlette", "tiktoken", "tqdm", "uvicorn", "uvloop", "watchfiles", "xxhash", "zstandard"),
)
# these would bring torch builds for GPUs along
BARE = ("compressed-tensors==0.18.0", "interegular", "llguidance", "openai-harmony==0.0.4")


def python_of(folder: Path) -> Path:
    """Return the interpreter that runs the engines."""
    return folder / "venv" / "bin" / "python"


def environment(folder: Path, overlays: Path, version: str, **extra: str) -> dict[str, str]:
    """Return the environment variables under which a release runs on the CPU."""
    path = [HERE / "sglang_cpu", folder / version, overlays / ENGINES[version][0]]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "DSPINE_"))}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(str(part.resolve()) for part in path),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **extra,
    }


@contextlib.contextmanager
def started(command, **options):
    """Start a command in a session of its own and end all of that session on the way out.

    An engine that fails kills the tree of processes it was started from, and one that is killed leaves children.
    """
    process = subprocess.Popen([str(part) for part in command], start_new_session=True, text=True, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(command, seconds: float, **options) -> subprocess.CompletedProcess:
    """Run a command to its end, or for `seconds`."""
    pipe = subprocess.PIPE
    with started(command, stdout=pipe, stderr=pipe, **options) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            errors += f"\nended after {seconds} s"
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def install(folder: Path, releases: list[str]) -> None:
    """Install what all releases share, and some of them, below `folder`; those that are there already stay."""
    pip = [str(python_of(folder)), "-m", "pip", "install", "--quiet"]
    if not python_of(folder).is_file():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        own = sysconfig.get_paths()["purelib"]
        link = folder / "venv" / "lib" / version / "site-packages" / "parent.pth"
        link.write_text(f"import site; site.addsitedir({own!r})\n")
    subprocess.run([*pip, "-c", str(HERE.parents[1] / "constraints.txt"), *SHARED], check=True)
    subprocess.run([*pip, "--no-deps", *BARE], check=True)
    for release in releases:
        packages = [f"sglang=={release}", f"xgrammar=={ENGINES[release][1]}"]
        if not (folder / release).is_dir():
            subprocess.run([*pip, "--no-deps", "--target", str(folder / release), *packages], check=True)


if __name__ == "__main__":
    import overlays

    chosen = sys.argv[4:] if sys.argv[3:4] == ["--only"] else list(ENGINES)
    install(Path(sys.argv[1]), chosen)
    # each runs with the transformers release it pins
    overlays.install(Path(sys.argv[2]), [ENGINES[release][0] for release in chosen])
