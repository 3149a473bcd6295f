"""The plugin in real SGLang engines on the CPU: registration, texts, acceptance, drafts, refusals, HTTP.

`make test` installs the engines and sets DSPINE_ENGINES. Every engine runs in a process of its own with a time limit;
what those CPU engines are made of is in `sglang_cpu/`.
"""

import collections
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from pathlib import Path

import pytest
import sglang_engines
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspine_hub.api import convert_drafter
from dspine_hub.checkpoints.loading import load_drafter_checkpoint
from dspine_hub.publish.bundle import build_bundle

ROOT = Path(__file__).resolve().parents[1]
MINI = ROOT / "examples" / "mini"
ENGINES = os.environ.get("DSPINE_ENGINES")
OVERLAYS = os.environ.get("DSPINE_OVERLAYS")
OLDEST, MIDDLE, NEWEST = sorted(sglang_engines.ENGINES)
LIMIT = 240

PROMPTS = (
    "def fibonacci(n):\n",
    "import os\n",
    "class Stack:\n    def push(self, item):\n",
    "for i in range(",
    "    try:\n        with open(path) as f:\n            return json.load(f)\n    except",
)
TOKENS = 48

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not (ENGINES and OVERLAYS), reason="needs DSPINE_ENGINES, see tests/helpers/sglang_engines.py"),
]


def start(version, *command, **variables):
    """Run a command under one SGLang release and wait for its end."""
    env = sglang_engines.environment(Path(ENGINES), Path(OVERLAYS), version, **variables)
    python = sglang_engines.python_of(Path(ENGINES))
    return sglang_engines.run([python, *command], LIMIT, env=env, cwd=ENGINES)


def engine_arguments(drafter=None, algorithm="DSPINE", **overrides):
    arguments = {"model_path": MINI / "target", "device": "cpu", "attention_backend": "torch_native"}
    arguments |= {"dtype": "float32", "max_total_tokens": 8192, "max_running_requests": 48, "random_seed": 0}
    arguments |= {"disable_cuda_graph": True, "log_level": "warning", "grammar_backend": "none"}
    arguments |= {"skip_server_warmup": True, "disable_radix_cache": True}
    if drafter is not None:
        arguments |= {"speculative_algorithm": algorithm, "speculative_draft_model_path": drafter}
    return {**arguments, **overrides}


def generate(version, place, engine, calls, **variables):
    """Run one engine; returns a list of outputs a call."""
    job, result = place / "job.json", place / "result.json"
    job.write_text(json.dumps({"engine": engine, "calls": calls}, default=str))
    done = start(version, ROOT / "tests" / "helpers" / "sglang_job.py", job, result, **variables)
    assert result.is_file(), done.stderr[-4000:]
    return json.loads(result.read_text())


def greedy(ids):
    return {"input_ids": ids, "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}}


@functools.cache
def prompt_ids():
    tokenizer = AutoTokenizer.from_pretrained(MINI / "target")
    return [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


@functools.cache
def reference_pair():
    target = AutoModelForCausalLM.from_pretrained(MINI / "target", dtype="float32").eval()
    return target, load_drafter_checkpoint(MINI / "drafter").float().bind(target)


@functools.cache
def loop_rounds():
    """Rounds of transformers' loop for the prompts, and its texts."""
    target, drafter = reference_pair()
    rounds, texts = [], []
    for ids in prompt_ids():
        output = drafter.spec_generate(
            target, torch.tensor([ids]), TOKENS, temperature=0.0, return_dict_in_generate=True, eos_token_id=None
        )
        rounds.append(output.statistics.rounds)
        texts.append(output.sequences[0, len(ids) :].tolist())
    return rounds, texts


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    return build_bundle(MINI / "drafter", tmp_path_factory.mktemp("bundle") / "mini")


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """Texts of plain decoding by the newest engine."""
    place = tmp_path_factory.mktemp("plain")
    (outputs,) = generate(NEWEST, place, engine_arguments(), [greedy(prompt_ids())])
    return [output["ids"] for output in outputs]


SAMPLED = {"temperature": 1.0, "top_k": 4, "max_new_tokens": 3, "ignore_eos": True}
SAMPLES, SAMPLES_A_CALL = 480, 48


@pytest.fixture(scope="session")
def served(bundle, tmp_path_factory):
    """One engine: greedy texts of all prompts, then samples of one; its first drafts lie beside the result."""
    place = tmp_path_factory.mktemp("served")
    calls = [greedy(prompt_ids()[:1]), greedy(prompt_ids())]
    batch = {"input_ids": [prompt_ids()[1]] * SAMPLES_A_CALL, "sampling_params": SAMPLED}
    calls += [batch] * (SAMPLES // SAMPLES_A_CALL)
    return place, generate(NEWEST, place, engine_arguments(bundle), calls, DSPINE_DUMP=str(place))


def assert_same_acceptance(outputs):
    """Catches a drafter that is served otherwise than it was trained: the text stays right, the rounds do not."""
    rounds, _ = loop_rounds()
    found = [output["rounds"] for output in outputs]
    # float32 sums in another order may turn a draft; the engine counts a round in which a text ends as whole
    assert abs(sum(found) - sum(rounds)) <= 0.02 * sum(rounds), (found, rounds)


@pytest.mark.parametrize("version", sglang_engines.ENGINES)
def test_the_plugin_registers_everything(version):
    """Catches a release whose tables moved: SGLang only logs a plugin that fails."""
    done = start(version, "-m", "dspine_hub.sglang_plugin")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "sglang": version,
        "algorithm": True,
        "architectures": ["DSpineForSpeculation", "DSpineDraftModel"],
        "config": True,
    }


def test_greedy_text_is_that_of_plain_decoding(plain, served):
    """Catches any loss, against the same engine without a drafter."""
    _, (first, outputs, *_) = served
    assert [output["ids"] for output in outputs] == plain
    assert first[0]["ids"] == plain[0]
    assert plain == loop_rounds()[1]


def test_acceptance_is_that_of_the_transformers_loop(served):
    _, (_, outputs, *_) = served
    assert_same_acceptance(outputs)


def test_drafts_are_those_of_the_model_for_the_same_text(served):
    """Catches full attention in a block, slots shifted by one, taps off by one, weights under a wrong name."""
    place, (outputs, *_) = served
    target, drafter = reference_pair()
    text = prompt_ids()[0] + outputs[0]["ids"]
    files = sorted(place.glob("*.pt"), key=lambda path: int(path.stem.split("-")[1]))
    assert len(files) == 6
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    taps = torch.cat([states[layer + 1] for layer in drafter.config.target_layer_ids], dim=-1).detach()
    position = len(prompt_ids()[0])
    for path in files:
        found = torch.load(path)
        anchor = found["anchor_token_ids"]
        assert anchor.tolist() == [text[position]]
        context = taps[:, :position]
        if position == len(prompt_ids()[0]):
            torch.testing.assert_close(found["context"][0], context[0], rtol=1e-3, atol=1e-3)
        output = drafter(target.get_input_embeddings()(block_of(drafter, anchor)), context, anchor_ids=anchor)
        rows = torch.cat((output.last_hidden_state, output.pre_injection_state), dim=-1)[:, 1:].detach()
        torch.testing.assert_close(found["hidden_states"][..., : rows.shape[-1]], rows, rtol=1e-3, atol=1e-3)
        draft = drafter.draft(context, anchor)
        assert found["tokens"].tolist() == draft.tokens.tolist()
        assert torch.equal(found["candidate_ids"].sort(-1).values, draft.candidates.sort(-1).values)
        # a greedy draft is certain of its token
        assert torch.equal(found["q"].max(-1).values, torch.ones(1, drafter.config.block_size - 1))
        right = [a == b for a, b in zip(draft.tokens[0].tolist(), text[position + 1 :], strict=False)]
        position += 1 + (right.index(False) if False in right else len(right))


def block_of(drafter, anchor):
    masks = anchor.new_full((1, drafter.config.block_size - 1), drafter.config.mask_token_id)
    return torch.cat((anchor[:, None], masks), dim=1)


def test_samples_have_the_targets_distribution(served):
    """Catches drafts drawn from other rows than `q` says, by the exact distribution of two tokens in a row."""
    _, (_, _, *sampled) = served
    found = collections.Counter(tuple(output["ids"][1:3]) for call in sampled for output in call)
    assert sum(found.values()) == SAMPLES
    expected = exact_pairs(prompt_ids()[1])
    assert set(found) <= set(expected)
    # cells too rare for the statistic are counted together
    rare = [pair for pair, share in expected.items() if share * SAMPLES < 5]
    cells = [(found[pair], share * SAMPLES) for pair, share in expected.items() if pair not in rare]
    if rare:
        cells.append((sum(found[pair] for pair in rare), sum(expected[pair] for pair in rare) * SAMPLES))
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells if mean > 0)
    freedom = len(cells) - 1
    # five standard deviations of chi-square: one run in a million fails by chance
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, (statistic, freedom)
    # drafts were accepted, or nothing was tested
    assert sum(output["rounds"] for call in sampled for output in call) < 1.9 * SAMPLES


def exact_pairs(prompt):
    """Distribution of the second and third new token under temperature 1 and top-k 4."""
    target, _ = reference_pair()

    @torch.no_grad()
    def shares(ids):
        top = target(torch.tensor([ids])).logits[0, -1].topk(4)
        return list(zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True))

    pairs = collections.Counter()
    for first, a in shares(prompt):
        for second, b in shares([*prompt, first]):
            for third, c in shares([*prompt, first, second]):
                pairs[second, third] += a * b * c
    return pairs


def test_two_ranks_draft_alike(bundle, plain, tmp_path):
    """Catches token tables read by a rank that holds other rows of them: split heads are scored another way."""
    engine = engine_arguments(bundle, tp_size=2)
    (outputs,) = generate(NEWEST, tmp_path, engine, [greedy(prompt_ids())], SGLANG_CPU_OMP_THREADS_BIND="0|1")
    assert [output["ids"] for output in outputs] == plain
    assert_same_acceptance(outputs)


def test_the_name_dflash_serves_the_same_drafter(bundle, plain, tmp_path):
    """Catches a checkpoint that only the name DSPINE can serve."""
    engine = engine_arguments(bundle, "DFLASH", disable_overlap_schedule=True)
    (outputs,) = generate(NEWEST, tmp_path, engine, [greedy(prompt_ids())])
    assert [output["ids"] for output in outputs] == plain
    assert_same_acceptance(outputs)


def test_a_trainers_export_is_served_with_cached_prefixes(plain, tmp_path):
    """Catches a checkpoint straight from the trainer, without code or record, that is refused or drafts otherwise.

    The second time every prompt is a cached prefix, whose rows the drafter must have kept too.
    """
    convert_drafter(MINI / "drafter", tmp_path / "export", to_format="specforge")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    # the record of the target is what a trainer's own export lacks
    del config["dspine_hub"]
    (tmp_path / "export" / "config.json").write_text(json.dumps(config))
    engine = engine_arguments(tmp_path / "export", disable_radix_cache=False)
    for outputs in generate(MIDDLE, tmp_path, engine, [greedy(prompt_ids())] * 2):
        assert [output["ids"] for output in outputs] == plain
        assert_same_acceptance(outputs)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def post(url, **body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT) as reply:
        return reply.read().decode()


def streamed(reply, read):
    parts = [line.removeprefix("data: ") for line in reply.splitlines() if line.startswith("data: {")]
    return "".join(read(json.loads(part)["choices"][0]) or "" for part in parts)


@pytest.fixture(scope="session")
def server(bundle, tmp_path_factory):
    """`dspine-hub serve` on the oldest release."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    flags = [part for name, value in engine_arguments().items() for part in flag_of(name, value)]
    command = ["-m", "dspine_hub", "serve", "--target", MINI / "target", "--drafter", bundle, "--port", port, *flags]
    env = sglang_engines.environment(Path(ENGINES), Path(OVERLAYS), OLDEST)
    with (
        log.open("w") as out,
        sglang_engines.started(
            [sglang_engines.python_of(Path(ENGINES)), *command], env=env, cwd=ENGINES, stdout=out, stderr=out
        ) as process,
    ):
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + LIMIT
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.5)
        yield url


def flag_of(name, value):
    if name in ("model_path", "speculative_algorithm"):
        return []
    flag = "--" + name.replace("_", "-")
    return ([flag] if value else []) if isinstance(value, bool) else [flag, value]


def test_completions_over_http(server):
    """Catches a server that answers otherwise than the target decodes, whole or streamed."""
    tokenizer = AutoTokenizer.from_pretrained(MINI / "target")
    expected = tokenizer.decode(loop_rounds()[1][0])
    body = {"model": "mini", "prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"skip_special_tokens": False}
    url = f"{server}/v1/completions"
    assert json.loads(post(url, **body))["choices"][0]["text"] == expected
    assert streamed(post(url, stream=True, **body), lambda choice: choice["text"]) == expected


def test_chat_completions_over_http(server):
    """Catches a chat template that is not applied, whole or streamed."""
    target, _ = reference_pair()
    tokenizer = AutoTokenizer.from_pretrained(MINI / "target")
    messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = target.generate(**ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    expected = tokenizer.decode(output[0, ids["input_ids"].shape[1] :])
    body = {"model": "mini", "messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    body |= {"skip_special_tokens": False}
    url = f"{server}/v1/chat/completions"
    assert json.loads(post(url, **body))["choices"][0]["message"]["content"] == expected
    assert streamed(post(url, stream=True, **body), lambda choice: choice["delta"].get("content")) == expected


def changed(bundle, place, edit):
    """Copy the drafter and change its weights."""
    folder = Path(shutil.copytree(bundle, place / "drafter"))
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def refusal(version, place, engine):
    """Start an engine that must not start; returns what it says."""
    (place / "job.json").write_text(json.dumps({"engine": engine, "calls": []}, default=str))
    done = start(version, ROOT / "tests" / "helpers" / "sglang_job.py", place / "job.json", place / "result.json")
    assert not (place / "result.json").exists() and done.returncode != 0
    assert "ended after" not in done.stderr, "the engine hung instead of ending"
    return done.stderr


@pytest.mark.parametrize(("version", "algorithm"), [(OLDEST, "DSPINE"), (NEWEST, "DFLASH")])
def test_a_wrong_pair_is_refused(bundle, tmp_path, version, algorithm):
    """Catches a drafter of another target, which would only be slow."""
    folder = changed(bundle, tmp_path, lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    config["target"]["tokenizer_sha256"] = "0" * 64
    (folder / "config.json").write_text(json.dumps(config))
    said = refusal(version, tmp_path, engine_arguments(folder, algorithm, disable_overlap_schedule=True))
    assert "does not fit" in said and "`tokenizer` must map ids to the same strings as in training" in said


def test_a_broken_checkpoint_is_refused(bundle, tmp_path):
    """Catches a tensor that is missing and stays as initialised: SGLang's own loader says nothing."""
    folder = changed(bundle, tmp_path, lambda tensors: tensors.pop("injection.writes.1.weight"))
    said = refusal(NEWEST, tmp_path, engine_arguments(folder))
    assert "must hold `injection.writes.1.weight` [192, 64], got none: it is incomplete" in said


STATE = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.speculative.spec_registry import get_spec
ours = sorted(name for name in sys.modules if name.startswith("dspine"))
print(json.dumps([get_spec("DSPINE") is not None, bool(ours)]))
"""


def venv_without_this_package(place):
    """Make an environment that sees everything installed but for this package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
    view = place / "view"
    view.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(("dspine", "__editable__", "_virtualenv")):
            (view / entry.name).symlink_to(entry)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shared = (Path(ENGINES) / "venv" / "lib" / version / "site-packages").resolve()
    site = place / "venv" / "lib" / version / "site-packages"
    (site / "others.pth").write_text(f"{shared}\n{view}\n")
    return place / "venv" / "bin" / "python", site


def test_uninstalling_leaves_sglang_untouched(tmp_path):
    """Catches a file of SGLang that the package changes, and what stays behind after `pip uninstall`."""
    python, site = venv_without_this_package(tmp_path)
    source = tmp_path / "source"
    for name in ("dspine_hub", "model_cards", "convert"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    files = {path: path.read_bytes() for path in (Path(ENGINES) / NEWEST / "sglang").rglob("*.py")}
    clean = sorted(site.rglob("*"))
    pip = [sys.executable, "-m", "pip", "--python", python]
    env = sglang_engines.environment(Path(ENGINES), Path(OVERLAYS), NEWEST, SGLANG_PLUGINS="dspine")

    def run(*command):
        done = sglang_engines.run(command, LIMIT, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()[-1:]

    run(*pip, "install", "--quiet", "--no-deps", source)
    assert run(python, "-c", STATE) == ["[true, true]"]
    run(*pip, "uninstall", "--quiet", "--yes", "dspine-hub")
    assert run(python, "-c", STATE) == ["[false, false]"]
    assert {path: path.read_bytes() for path in files} == files
    assert [path for path in sorted(site.rglob("*")) if "__pycache__" not in path.parts] == clean
