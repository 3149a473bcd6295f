"""Interrupted runs end in the same bits, and measuring a run does not change it."""

import pytest
import torch
from helpers.training import RecordingTrainer, causal_config, read_log

from dspine_hub.training.loop import Trainer


def test_an_interrupted_run_ends_in_the_same_bits(unbroken, corpus, trained_target, tmp_path):
    """Catches state missing from a checkpoint (optimizer, schedule, step), batches or anchors drawn from a stream that
    a restart resets, and log lines written twice."""
    reference, config, _ = unbroken
    config = config.model_copy(update={"output": tmp_path / "run", "save_every": 2})
    broken = RecordingTrainer(config)
    broken.stop_at = 5
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    assert [folder.name for folder in broken._checkpoints()] == ["step-2", "step-4"]
    assert read_log(config.output)[-1]["step"] == 5
    torch.rand(7)
    resumed = RecordingTrainer(config)
    resumed.run()
    assert resumed.step == 6
    assert reference.final.keys() == resumed.final.keys()
    for name, value in reference.final.items():
        assert torch.equal(value, resumed.final[name]), name
    saved = [(folder / "model.safetensors").read_bytes() for folder in (reference.config.output, config.output)]
    assert saved[0] == saved[1]
    assert read_log(reference.config.output) == read_log(config.output)


def test_an_interrupted_causal_lm_run_ends_in_the_same_bits(corpus, tmp_path):
    """As above for the other kind of run, whose tied weights a checkpoint must keep tied."""
    finals = []
    for name, stop in (("whole", None), ("broken", 3)):
        config = causal_config(corpus, tmp_path / name, steps=4, save_every=2, eval_every=100)
        trainer = RecordingTrainer(config)
        trainer.stop_at = stop
        if stop:
            with pytest.raises(KeyboardInterrupt):
                trainer.run()
            trainer = RecordingTrainer(config)
        trainer.run()
        finals.append(trainer.final)
    for name, value in finals[0].items():
        assert torch.equal(value, finals[1][name]), name


def test_only_the_newest_checkpoints_stay(corpus, tmp_path):
    """Sorted as text, step 10 would be older than step 9, and the newest would be deleted."""
    trainer = Trainer(causal_config(corpus, tmp_path / "run", keep_checkpoints=2))
    trainer.config.output.mkdir()
    for step in (8, 9, 10, 11):
        trainer.step = step
        trainer.save_checkpoint()
    assert [folder.name for folder in trainer._checkpoints()] == ["step-10", "step-11"]
    trainer.step = 0
    trainer.resume()
    assert trainer.step == 11


def test_evaluation_leaves_training_as_it_was(corpus, trained_target, tmp_path, unbroken):
    """An evaluation that draws from the training stream, or leaves eval mode on, changes the run that it measures."""
    reference, config, _ = unbroken
    config = config.model_copy(update={"output": tmp_path / "run", "eval_every": 1})
    trainer = RecordingTrainer(config)
    trainer.run()
    assert trainer.objective.training and trainer.model.training
    for name, value in reference.final.items():
        assert torch.equal(value, trainer.final[name]), name
