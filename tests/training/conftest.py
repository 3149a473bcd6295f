"""A pair to train, a small corpus, and one finished run of each kind."""

import json

import numpy as np
import pytest
from helpers.paths import MINI
from helpers.tiny import build_drafter, build_target
from helpers.training import RecordingTrainer, causal_config, drafter_config
from transformers import AutoTokenizer

from dspine_hub.training.loop import Trainer


@pytest.fixture
def pair():
    """Return a target of its own (the objective freezes it) and a drafter with loud writes."""
    target = build_target()
    return target, build_drafter(target).train()


@pytest.fixture(scope="package")
def tokenizer():
    return AutoTokenizer.from_pretrained(MINI / "target")


@pytest.fixture(scope="package")
def corpus(tmp_path_factory, tokenizer):
    """A folder with `train.bin`, `eval.bin` (a few thousand tokens of source) and `prompts.jsonl`."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [json.loads(line)["prompt"] for line in (MINI / "heldout.jsonl").open(encoding="utf-8")]
    stream = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    np.array(stream[:3000], dtype="uint16").tofile(folder / "train.bin")
    np.array(stream[3000:4000], dtype="uint16").tofile(folder / "eval.bin")
    prompts = [json.dumps({"prompt": text[:40]}) for text in texts[:3]]
    (folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    return folder


@pytest.fixture(scope="package", autouse=True)
def on_cpu():
    """Bit-identity and the tolerances here are the CPU's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        yield


@pytest.fixture(scope="package")
def trained_target(corpus, tmp_path_factory):
    """A tiny target trained by the loop itself; the drafter runs below use its folder."""
    output = tmp_path_factory.mktemp("target") / "run"
    Trainer(causal_config(corpus, output, steps=40)).run()
    return output


@pytest.fixture(scope="package")
def unbroken(corpus, trained_target, tmp_path_factory):
    """An unbroken drafter run: its trainer, config and evaluation."""
    config = drafter_config(corpus, tmp_path_factory.mktemp("drafter") / "run", trained_target)
    trainer = RecordingTrainer(config)
    return trainer, config, trainer.run()
