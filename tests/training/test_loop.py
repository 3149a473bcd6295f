"""The loop: runs that learn, log, save what transformers loads, and add up whatever their pieces."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from helpers.training import TERMS, TINY_DRAFTER, RecordingTrainer, causal_config, drafter_config, read_log
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspine_hub.checkpoints.targets import LoadedTarget
from dspine_hub.errors import DSpineHubError
from dspine_hub.modeling_dspine import DSpineForSpeculation
from dspine_hub.training.config import TrainConfig
from dspine_hub.training.loop import Trainer


def test_a_causal_lm_run_learns_and_loads(trained_target, tokenizer):
    """Catches an optimizer that steps nothing, and a folder that lacks tokenizer, end token or weights."""
    log = read_log(trained_target)
    losses = [record["loss"] for record in log if "loss" in record]
    assert len(losses) == 40
    assert losses[0] == pytest.approx(math.log(8192), abs=0.2)
    assert losses[-1] < losses[0] - 1.5
    assert log[-1]["step"] == 40 and log[-1]["eval_loss"] < losses[0]
    model, report = AutoModelForCausalLM.from_pretrained(trained_target, dtype="auto", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype == torch.bfloat16 and model.config.eos_token_id == 8124
    assert AutoTokenizer.from_pretrained(trained_target).get_vocab() == tokenizer.get_vocab()


def test_a_drafter_run_logs_every_term(unbroken):
    """A term that is not logged cannot be watched; an evaluation that is not logged is lost at the next one."""
    _, config, evaluation = unbroken
    log = read_log(config.output)
    training = [record for record in log if "loss" in record]
    assert [record["step"] for record in training] == [1, 2, 3, 4, 5, 6]
    for record in training:
        assert set(record) == {"step", "grad_norm", "learning_rate", *TERMS}
        assert all(math.isfinite(value) for value in record.values())
    held_out = [record for record in log if "eval_loss" in record]
    assert [record["step"] for record in held_out] == [3, 6]
    names = {f"eval_{name}" for name in TERMS} | {"eval_tau_pooled", "eval_acceptance_per_slot"}
    assert set(held_out[-1]) == {"step", *names}
    assert {**evaluation, "step": 6} == held_out[-1]
    assert 1 <= evaluation["eval_tau_pooled"] <= 4 and len(evaluation["eval_acceptance_per_slot"]) == 3


def test_the_learning_rate_warms_up_and_decays(corpus, trained_target, tmp_path):
    """Catches a scheduler stepped twice a step (accelerate does so for every process) or not at all."""
    optimizer = {"learning_rate": 1e-2, "warmup_ratio": 0.5, "final_ratio": 0.1}
    config = causal_config(corpus, tmp_path / "run", optimizer=optimizer, steps=4, eval_every=100)
    trainer = Trainer(config)
    rates = []
    for _ in range(4):
        rates.append(trainer.scheduler.get_last_lr()[0])
        trainer._train_step()
    # two warm-up steps from 0, then a cosine over two steps; never reaching its end, 0.1
    assert rates == pytest.approx([0.0, 0.5e-2, 1e-2, 1e-2 * (0.1 + 0.9 * 0.5)])
    assert trainer.scheduler.get_last_lr()[0] == pytest.approx(1e-3)


def test_a_drafter_run_saves_what_transformers_loads(unbroken, trained_target, tokenizer):
    """Catches weights saved in float32 or not at all, a record of another target, and codes that were rounded or
    rebuilt on the way."""
    trainer, config, _ = unbroken
    drafter, report = DSpineForSpeculation.from_pretrained(config.output, dtype="auto", output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}
    assert drafter.config.dtype == torch.bfloat16
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, trainer.final[name].to(value.dtype)), name
    target = AutoModelForCausalLM.from_pretrained(trained_target, dtype=torch.float32)
    assert drafter.config.target == LoadedTarget(target, tokenizer).record("lab/Tiny")
    assert bool(drafter.transfer_ready)
    drafter.float().bind(target, tokenizer)
    ids = tokenizer("def f(x):\n", return_tensors="pt")["input_ids"]
    text = drafter.spec_generate(target, ids, max_new_tokens=8, temperature=0.0)
    assert torch.equal(text, target.generate(ids, max_new_tokens=8, do_sample=False))


def test_training_json_records_config_environment_and_steps(unbroken):
    """A checkpoint without its recipe cannot be reproduced."""
    _, config, evaluation = unbroken
    record = json.loads((config.output / "training.json").read_text())
    assert set(record) == {"config", "environment", "steps", "evaluation"}
    assert TrainConfig.model_validate(record["config"]) == config
    assert set(record["environment"]) == {"machine", "versions", "commit"}
    assert record["environment"]["versions"]["torch"] == torch.__version__
    assert record["steps"] == 6 and record["evaluation"] == evaluation


def test_micro_batches_add_up_to_the_batch(corpus, tmp_path):
    """Catches gradients that are summed instead of averaged, and an optimizer that steps at every piece."""
    results = []
    for micro in (4, 2, 1):
        config = causal_config(
            corpus, tmp_path / str(micro), micro_batch_size=micro, optimizer={"learning_rate": 1e-2}
        )
        trainer = Trainer(config)
        metrics = [trainer._train_step() for _ in range(2)]
        results.append([(float(m["loss"]), float(m["grad_norm"])) for m in metrics])
    for other in results[1:]:
        for (loss, norm), (other_loss, other_norm) in zip(results[0], other, strict=True):
            assert other_loss == pytest.approx(loss, rel=1e-5)
            assert other_norm == pytest.approx(norm, rel=1e-4)


def test_a_batch_that_does_not_divide_is_refused(corpus, tmp_path):
    """A remainder would be dropped in silence."""
    with pytest.raises(DSpineHubError, match=r"`batch_size` must be a multiple .* got 4"):
        Trainer(causal_config(corpus, tmp_path / "run", micro_batch_size=3))


def test_a_compact_drafter_keeps_its_codes_when_saved(corpus, trained_target, tmp_path):
    """A basis rounded to bfloat16 rebuilds other codes than the ones the drafter was trained with."""
    model = {**TINY_DRAFTER, "transfer_storage": "basis"}
    trainer = RecordingTrainer(drafter_config(corpus, tmp_path / "run", trained_target, model=model, steps=1))
    codes = trainer.model.transfer_codes.clone()
    trainer.run()
    target = AutoModelForCausalLM.from_pretrained(trained_target, dtype=torch.float32)
    drafter = DSpineForSpeculation.from_pretrained(tmp_path / "run", dtype="auto").bind(target)
    assert {buffer.dtype for buffer in drafter.transfer_basis.buffers()} == {torch.float32}
    assert torch.equal(drafter.transfer_codes, codes)


def test_without_injection_a_run_leaves_the_injection_silent(corpus, trained_target, tmp_path):
    """Weight decay or an optimizer group of frozen parameters would move what the ablation freezes."""
    optimizer = {"learning_rate": 1e-2, "weight_decay": 0.1}
    objective = {"anchors": 4, "injection": False}
    config = drafter_config(
        corpus, tmp_path / "run", trained_target, optimizer=optimizer, objective=objective, steps=2, acceptance=None
    )
    trainer = RecordingTrainer(config)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    evaluation = trainer.run()
    assert "eval_tau_pooled" not in evaluation
    for name, value in trainer.final.items():
        frozen = name.startswith(("injection.", "transfer_"))
        assert torch.equal(value, before[name]) == frozen, name


@pytest.mark.slow
def test_two_processes_train_one_model(unbroken, tmp_path):
    """Catches a model saved twice or in parts, a log written by every process, and a result printed twice."""
    _, config, _ = unbroken
    fields = json.loads(config.model_dump_json()) | {"output": str(tmp_path / "run"), "micro_batch_size": 1}
    (tmp_path / "run.yaml").write_text(json.dumps(fields))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    result = subprocess.run(
        [*command, "-m", "dspine_hub", "train", str(tmp_path / "run.yaml")],
        capture_output=True,
        text=True,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count('"output"') == 1
    log = read_log(tmp_path / "run")
    assert [record["step"] for record in log if "loss" in record] == sorted({r["step"] for r in log if "loss" in r})
    drafter = DSpineForSpeculation.from_pretrained(tmp_path / "run")
    assert bool(drafter.transfer_ready)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in drafter.parameters())
