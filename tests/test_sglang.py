"""The plugin without an engine: scores from logits, tensors, arguments, the command, the doctor."""

import importlib
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from conftest import build_drafter
from sglang_engines import ENGINES
from test_kernels import FLOAT32, injection_weights, rms_norm, weights

from dspine_hub import sglang_plugin
from dspine_hub.api import convert_drafter
from dspine_hub.bundle import build_bundle
from dspine_hub.cli import main
from dspine_hub.configuration_dspine import DSpineConfig
from dspine_hub.convert.conversion import expected_tensors
from dspine_hub.errors import DSpineHubError
from dspine_hub.kernels import transition_scores_reference
from dspine_hub.kernels.transfer_tables import head_message_table
from dspine_hub.sglang_plugin import command, doctor, startup
from dspine_hub.sglang_plugin.target_head import rebuild_codes
from dspine_hub.sglang_plugin.tensors import TensorAccount

ROOT = Path(__file__).resolve().parents[1]
MINI = ROOT / "examples" / "mini"


def stand_in_modules(monkeypatch):
    """Stand in for the few names of SGLang that the modules under test import."""

    def module(name, **names):
        stand_in = ModuleType(name)
        vars(stand_in).update(names)
        monkeypatch.setitem(sys.modules, name, stand_in)

    for name in ("sglang", "sglang.srt", "sglang.srt.distributed", "sglang.srt.layers"):
        module(name)
    module("sglang.srt.distributed.communication_op", tensor_model_parallel_all_gather=None)
    module("sglang.srt.layers.logits_processor", should_apply_lm_head_quant_method=lambda head, method: bool(method))
    module("sglang.srt.runtime_context", get_parallel=lambda: SimpleNamespace(tp_size=1))
    module("sglang.srt.server_args", DRAFT_ATTENTION_BACKEND_CHOICES=["flashinfer", "fa3", "triton"])
    return module


@pytest.fixture
def stand_ins(monkeypatch):
    return stand_in_modules(monkeypatch)


class EightBitHead(torch.nn.Module):
    """A head of integers: its rows are no matrix anybody may read, only `quant_method` can apply them."""

    def __init__(self, rows):
        super().__init__()
        self.scale = rows.abs().amax(dim=1) / 127
        self.weight = torch.nn.Parameter((rows / self.scale[:, None]).round().to(torch.int8), requires_grad=False)
        self.quant_method = self

    def apply(self, head, hidden, bias):
        return (hidden.float() @ (self.weight.float() * self.scale[:, None]).T).to(hidden.dtype)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, FLOAT32), (torch.bfloat16, 1e-2)], ids=str)
def test_a_quantised_head_is_scored_through_its_own_method(stand_ins, monkeypatch, dtype, bound):
    """Catches integers multiplied as if they were activations, a refusal (sglang#35534), gates of another dtype."""
    monkeypatch.delitem(sys.modules, "dspine_hub.sglang_plugin.transition_cache", raising=False)
    cache = importlib.import_module("dspine_hub.sglang_plugin.transition_cache")
    space = importlib.import_module("dspine_hub.sglang_plugin.transfer_space")
    R, H, M, V = 16, 32, 8, 97
    w = {name: v.to(dtype) if torch.is_tensor(v) else v for name, v in weights(R, H, M, V).items()}
    config = SimpleNamespace(hidden_size=H, transfer_rank=R, message_size=M, num_hidden_layers=1)
    injection = space.TransferSpace(config).to(dtype)
    sources = {"readouts.0.weight": w["readout"], "writes.0.weight": w["write"], "bias": w["bias"]}
    sources |= {f"{name}.weight": w[name] for name in ("message", "receiver_gate", "predecessor_gate")}
    injection.load_state_dict(sources)
    injection.requires_grad_(False)
    norm = SimpleNamespace(weight=w["norm_weight"], variance_epsilon=w["norm_eps"])
    injection.prepare(w["codes"], norm)
    head = EightBitHead(w["head_weight"].float())
    selector = cache.TransitionCache(injection, norm, 8)
    selector.attach(head)
    hidden = torch.randn(2, 5, H, generator=torch.Generator().manual_seed(5)).to(dtype)
    anchor = torch.tensor([3, 96])
    injected = injection.inject(hidden, anchor, 0)
    normed = rms_norm(injected.hidden, w["norm_weight"], w["norm_eps"])
    unary, candidates = head.apply(head, normed[:, 1:], None).float().topk(8, dim=-1)
    rows = cache.pack_selector_rows(normed.flatten(0, 1), hidden.flatten(0, 1), injected, injection.rows_readable)
    found = selector.build_lattice(
        candidate_ids=candidates,
        unary_logits=unary,
        hidden_states=rows.view(2, 5, -1)[:, 1:],
        anchor_token_ids=anchor,
    )
    exact = head.weight.float() * head.scale[:, None]
    wide = {name: v.float() if torch.is_tensor(v) else v for name, v in w.items()}
    expected = transition_scores_reference(
        hidden[:, 1:].float(),
        candidates,
        anchor,
        wide["codes"],
        injection_weights(wide),
        wide["norm_weight"],
        w["norm_eps"],
        exact,
    )
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound * float(expected.abs().max()))


def gather_shards(rank, place, dtype):
    """One of two ranks: gather the table of a split head, and compare it with that of the whole one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_in = stand_in_modules(monkeypatch)

        def gather(shard, dim):
            parts = [torch.empty_like(shard), torch.empty_like(shard)]
            torch.distributed.all_gather(parts, shard)
            return torch.cat(parts, dim=dim)

        stand_in("sglang.srt.distributed.communication_op", tensor_model_parallel_all_gather=gather)
        stand_in("sglang.srt.runtime_context", get_parallel=lambda: SimpleNamespace(tp_size=2))
        cache = importlib.import_module("dspine_hub.sglang_plugin.transition_cache")
        w = {name: v.to(dtype) if torch.is_tensor(v) else v for name, v in weights(16, 32, 8, 64).items()}
        head, found = SimpleNamespace(weight=w["head_weight"].chunk(2)[rank]), []
        space = SimpleNamespace(
            writes=[SimpleNamespace(weight=w["write"])], attach_head=lambda messages, weight: found.append(messages)
        )
        cache.TransitionCache(space, SimpleNamespace(weight=w["norm_weight"]), 8).attach(head)
    expected = head_message_table(w["head_weight"], w["write"], w["norm_weight"])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[0], expected, strict=True))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_gather_the_table_of_a_split_head(tmp_path, dtype):
    """Catches integers of 16 bits handed to a backend that knows none, and rows whose scale stayed on a rank."""
    torch.multiprocessing.spawn(gather_shards, (tmp_path / "store", dtype), nprocs=2)


# tensors


@pytest.mark.parametrize("changes", [{}, {"transfer_storage": "basis"}, {"attention_bias": True}], ids=str)
def test_expected_tensors_are_the_models_own(target, changes):
    """Catches a list that drifts from the model: a load would then refuse every checkpoint."""
    drafter = build_drafter(target, **changes)
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    assert expected_tensors(drafter.config) == expected


def test_a_load_accounts_for_every_tensor():
    """Catches a tensor that is dropped, missing, doubled or of another shape without a word."""
    account = TensorAccount({"norm.weight": (4,), "injection.bias": (2,)})
    assert account.take("model.norm.weight", torch.zeros(4)) == "norm.weight"
    with pytest.raises(ValueError, match="`norm.weight` must be stored once"):
        account.take("norm.weight", torch.zeros(4))
    with pytest.raises(ValueError, match=r"`codebook` \[3\] is no tensor of a drafter"):
        account.take("codebook", torch.zeros(3))
    with pytest.raises(ValueError, match=r"`injection.bias` must have shape \[2\], got \[3\]"):
        account.take("injection.bias", torch.zeros(3))
    with pytest.raises(ValueError, match=r"must hold `injection.bias` \[2\], got none"):
        account.close()
    account.take("injection.bias", torch.zeros(2))
    account.close()


@pytest.mark.parametrize("tied", [True, False])
def test_codes_of_a_compact_checkpoint_come_from_the_targets_files(make_target, tmp_path, tied):
    """Catches codes made of the embedding where the head is another matrix."""
    target = make_target(tie_word_embeddings=tied)
    target.save_pretrained(tmp_path)
    drafter = build_drafter(target, transfer_storage="basis")
    basis = {name: getattr(drafter.transfer_basis, name) for name in ("mean", "directions", "eigenvalues")}
    assert torch.equal(rebuild_codes(str(tmp_path), None, basis, torch.device("cpu")), drafter.transfer_codes)


# versions and registration

VERSIONS = {"0.5.18": False, "0.5.19": True, "0.5.21.post1": True, "0.5.23+cu130": True, "0.5.24": False}
VERSIONS |= {"0.6.0": False, "0.5.22rc1": False, "0.0.0.dev0": False, "unknown": False}


@pytest.mark.parametrize(("version", "supported"), VERSIONS.items())
def test_versions(version, supported):
    assert sglang_plugin.is_supported(version) is supported


def test_every_statement_of_the_supported_range_agrees():
    """Catches a range that is widened in one place only."""
    (extra,) = [line for line in importlib.metadata.requires("dspine-hub") if line.startswith("sglang")]
    oldest, newest = sglang_plugin.SUPPORTED.split(" to ")
    assert (oldest, newest) == (min(ENGINES), max(ENGINES))
    after = f"0.5.{int(newest.split('.')[-1]) + 1}"
    assert f">={oldest}" in extra and f"<{after}" in extra
    assert f"{oldest} to {newest}" in " ".join((ROOT / "README.md").read_text().split())


def test_another_release_gets_one_line_and_no_registration(stand_ins, caplog):
    """Catches a plugin that fails in silence: SGLang goes on without it."""
    stand_ins("sglang.version", __version__="0.5.18")
    with caplog.at_level(logging.ERROR):
        sglang_plugin.register()
    (record,) = caplog.records
    assert "supports sglang 0.5.19 to 0.5.23, got 0.5.18" in record.getMessage()
    assert "dspine_hub.sglang_plugin.registration" not in sys.modules


def test_the_entry_point_resolves():
    (entry,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name=doctor.ENTRY_POINT)
    assert entry.load() is sglang_plugin.register


def test_importing_the_plugin_loads_neither_torch_nor_sglang():
    """Catches work that every process of SGLang would pay for."""
    code = (
        "import dspine_hub.sglang_plugin, sys; print(sorted({'torch', 'transformers', 'sglang'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# configs and arguments


def trainer_config(**changes):
    """The mini drafter's config as the public trainer writes one."""
    raw = json.loads((MINI / "drafter" / "config.json").read_text())
    method = {"transfer_rank": raw.pop("transfer_rank"), "message_size": raw.pop("message_size"), "ce_weight": 0.1}
    method["top_k"] = raw.pop("num_candidates")
    block = {name: raw.pop(name) for name in ("target_layer_ids", "mask_token_id")}
    for name in ("target", "transfer_storage"):
        raw.pop(name)
    raw |= {"model_type": "qwen3", "architectures": ["DSpineDraftModel"]}
    return {**raw, "dflash_config": block, "dspine_config": method, **changes}


def test_a_trainers_config_is_read():
    """Catches sizes or taps lost between two formats."""
    ours = startup.drafter_config(json.loads((MINI / "drafter" / "config.json").read_text()))
    theirs = startup.drafter_config(trainer_config())
    names = set(DSpineConfig.__dataclass_fields__) - {"target", "architectures", "transformers_version", "dtype"}
    assert {name: getattr(theirs, name) for name in names} == {name: getattr(ours, name) for name in names}


CONFIGS = {
    "sliding": ({"layer_types": ["sliding_attention"] * 3}, "`layer_types` must be 'full_attention' everywhere"),
    "bidirectional": ({"is_causal": False}, "`is_causal` must be true"),
    "no-method": ({"dspine_config": None}, "this is no DSpine drafter"),
    "two-blocks": ({"dspine_config": {"block_size": 16}}, "`block_size` must be the same wherever it is given"),
}


@pytest.mark.parametrize(("changes", "message"), CONFIGS.values(), ids=CONFIGS)
def test_attention_that_is_not_dspines_is_refused(changes, message):
    """Catches a window or a bidirectional block served as full and causal, in silence (sglang#32595)."""
    with pytest.raises(DSpineHubError, match=message):
        startup.drafter_config(trainer_config(**changes))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return str(build_bundle(MINI / "drafter", tmp_path_factory.mktemp("bundle") / "mini"))


def server_arguments(bundle, **changes):
    arguments = {"model_path": str(MINI / "target"), "revision": None, "speculative_draft_model_path": bundle}
    arguments |= {"speculative_draft_model_revision": None, "device": "cuda", "pp_size": 1}
    arguments |= {"enable_dp_attention": False, "speculative_num_draft_tokens": None, "max_running_requests": None}
    arguments |= {"speculative_draft_window_size": None, "speculative_draft_attention_backend": None}
    return SimpleNamespace(**{**arguments, "attention_backend": "fa3", **changes})


def test_arguments_are_filled_in(stand_ins, bundle):
    """Catches a block, a count of requests or a backend left to defaults of other algorithms."""
    arguments = server_arguments(bundle)
    startup.check_pair_of(arguments)
    startup.resolve_arguments(arguments)
    assert (arguments.speculative_num_steps, arguments.speculative_eagle_topk) == (1, 1)
    assert (arguments.speculative_num_draft_tokens, arguments.max_running_requests) == (8, 48)
    assert arguments.speculative_draft_attention_backend == "fa3"
    arguments = server_arguments(bundle, attention_backend="torch_native", speculative_num_draft_tokens=4)
    startup.resolve_arguments(arguments)
    assert arguments.speculative_draft_attention_backend == "flashinfer"
    assert arguments.speculative_num_draft_tokens == 4


ARGUMENTS = {
    "device": ({"device": "cpu"}, "`--device` must be one of"),
    "pipeline": ({"pp_size": 2}, "`--pp-size` must be 1 for DSPINE, got 2"),
    "dp-attention": ({"enable_dp_attention": True}, "`--enable-dp-attention` must be False"),
    "window": ({"speculative_draft_window_size": 4}, "must be at least the block's 8 rows, got 4"),
}


@pytest.mark.parametrize(("changes", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_cannot_work_are_refused(stand_ins, bundle, changes, message):
    with pytest.raises(DSpineHubError, match=message):
        startup.resolve_arguments(server_arguments(bundle, **changes))


def test_no_drafter_is_refused(bundle):
    with pytest.raises(DSpineHubError, match="must name the drafter for DSPINE, got nothing"):
        startup.check_pair_of(server_arguments(None))


OTHER_TARGETS = {
    "hidden-size": ({"hidden_size": 256}, "`hidden_size` of the drafter must equal the target's, got 256"),
    "layers": ({"num_target_layers": 36}, "`num_target_layers` of the drafter must equal the target's, got 36"),
    "vocabulary": ({"vocab_size": 9000}, "`vocab_size` of the drafter must equal the target's, got 9000"),
}


@pytest.mark.parametrize(("changes", "message"), OTHER_TARGETS.values(), ids=OTHER_TARGETS)
def test_a_trainers_drafter_must_fit_the_target_too(tmp_path, changes, message):
    """Catches a checkpoint in another format that reaches the engine unchecked."""
    (tmp_path / "config.json").write_text(json.dumps(trainer_config(**changes)))
    with pytest.raises(DSpineHubError, match=message):
        startup.check_pair_of(server_arguments(str(tmp_path)))


def test_a_quantised_drafter_is_refused(tmp_path):
    """Catches weights of 8 bits that an engine loads as they are, or refuses without a word about the drafter."""
    convert_drafter(MINI / "drafter", tmp_path / "fp8", quantize="fp8")
    with pytest.raises(DSpineHubError, match="Serve the bundle it was quantised from"):
        startup.check_pair_of(server_arguments(str(tmp_path / "fp8")))


# the command line


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(command, "installed_sglang", lambda: "0.5.21")


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_serve_prints_the_whole_command(installed, bundle):
    """Catches a command that is not what runs, or one that forgets what users forget."""
    result = invoke("serve", "--target", MINI / "target", "--drafter", bundle, "--print", "--port", 3000, "--tp=2")
    assert result.exit_code == 0, result.output
    launch = f"{sys.executable} -m sglang.launch_server --model-path {MINI / 'target'} "
    own = f"--speculative-algorithm DSPINE --speculative-draft-model-path {bundle} "
    filled = "--speculative-draft-model-quantization unquant --speculative-num-draft-tokens 8 "
    assert result.stdout == launch + own + filled + "--port 3000 --tp=2\n"


def test_serve_leaves_flags_of_the_user_alone(installed, bundle):
    flags = ["--speculative-num-draft-tokens=4", "--speculative-draft-model-quantization", "fp8"]
    line = command.launch_command(str(MINI / "target"), bundle, [*flags, "--context-length", "20000"])
    assert line[-5:] == [*flags, "--context-length", "20000"]
    assert [part for part in line if part.startswith("--speculative-num-draft-tokens")] == flags[:1]
    # beyond the drafter's own positions it sees its newest rows only
    assert line[line.index("--speculative-draft-window-size") + 1] == "8192"


def _other_tokenizer(bundle, tmp_path):
    folder = Path(shutil.copytree(bundle, tmp_path / "drafter"))
    config = json.loads((folder / "config.json").read_text())
    config["target"]["tokenizer_sha256"] = "0" * 64
    (folder / "config.json").write_text(json.dumps(config))
    return [folder]


SERVE_ERRORS = {
    "wrong-pair": (_other_tokenizer, "`tokenizer` must map ids to the same strings as in training"),
    "own-flag": (lambda bundle, tmp_path: [bundle, "--model-path=x"], "`--model-path` must not be given here"),
    "no-folder": (lambda bundle, tmp_path: [tmp_path / "none"], "no such folder"),
}


@pytest.mark.parametrize(("arguments", "message"), SERVE_ERRORS.values(), ids=SERVE_ERRORS)
def test_serve_refuses_in_one_readable_error(installed, bundle, tmp_path, arguments, message):
    result = invoke("serve", "--target", MINI / "target", "--print", "--drafter", *arguments(bundle, tmp_path))
    assert result.exit_code == 1 and result.stderr.startswith("Error: ") and message in result.stderr


@pytest.mark.parametrize(("version", "message"), [(None, "got none"), ("0.5.24", "0.5.19 to 0.5.23, got 0.5.24")])
def test_serve_needs_a_tested_release(monkeypatch, bundle, version, message):
    monkeypatch.setattr(command, "installed_sglang", lambda: version)
    result = invoke("serve", "--target", MINI / "target", "--drafter", bundle, "--print")
    assert result.exit_code == 1 and message in result.stderr and "dspine-hub[sglang]" in result.stderr


def test_doctor_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "installed_sglang", lambda: None)
    result = invoke("doctor", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["ok"] is False
    assert found["plugin"]["entry_point"] == "dspine_hub.sglang_plugin:register"
    assert "sglang" in [finding["rule"] for finding in found["findings"]]
    assert "pip install" in invoke("doctor").stdout


REGISTERED = {"algorithm": True, "config": True, "architectures": ["a", "b"]}
PROBES = {
    "fine": (REGISTERED, {}, set()),
    "not-registered": ({"algorithm": False, "config": False, "architectures": []}, {}, {"registration"}),
    "whitelist": (
        {"algorithm": True, "config": True, "architectures": ["a", "b"]},
        {"SGLANG_PLUGINS": "other"},
        {"whitelist"},
    ),
    "import": (None, {}, {"import"}),
}


@pytest.mark.parametrize(("probe", "variables", "rules"), PROBES.values(), ids=PROBES)
def test_doctor_asks_sglang_itself(monkeypatch, probe, variables, rules):
    """Catches a doctor that calls an installed plugin a working one."""
    monkeypatch.setattr(doctor, "installed_sglang", lambda: "0.5.21")
    monkeypatch.setattr(doctor, "_version", lambda name: "0.5.21" if name == "sglang" else "1")
    pins = ["torch==2.13.0", 'av==1; sys_platform == "x"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: pins)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    output = "" if probe is None else json.dumps(probe)
    result = subprocess.CompletedProcess([], 0, output, "ImportError: libcuda.so.1")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: result)
    found = doctor.examine()
    errors = {finding["rule"] for finding in found["findings"] if finding["severity"] == "error"}
    assert errors == rules
    assert [f["message"] for f in found["findings"] if f["rule"] == "pin"] == [
        "`torch` must be 2.13.0 for sglang 0.5.21, got 1."
    ]
