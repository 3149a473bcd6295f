"""Tiny runs of training: their configs, batches with holes, and a trainer that can be stopped."""

import json

import torch
from helpers.paths import MINI

from dspine_hub.training.config import TrainConfig
from dspine_hub.training.loop import Trainer

TERMS = ("loss", "backbone_ce", "backbone_l1", "refinement", "alignment", "coverage", "accuracy")

# float32 against float64 through three layers and a softmax: some hundred roundings of values below 10
FLOAT32 = {"rtol": 2e-4, "atol": 2e-4}
# the same float32 numbers added in another order
REORDERED = {"rtol": 1e-4, "atol": 1e-6}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch_with_holes(seed: int = 3, rows: int = 2, length: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids and a loss mask with an unsupervised head, single holes and a padded tail."""
    ids = torch.randint(0, 96, (rows, length), generator=seeded(seed))
    mask = torch.ones(rows, length, dtype=torch.bool)
    mask[0, :3] = False
    mask[0, 8] = False
    mask[1, [2, 6]] = False
    mask[1, -1] = False
    return ids, mask


def run_fields(output, target, train, **fields) -> dict:
    """Fields of a small valid run."""
    base = {
        "kind": "drafter",
        "output": str(output),
        "target": str(target),
        "model": {},
        "data": {"train": [{"path": str(train)}], "sequence_length": 32},
        "optimizer": {"learning_rate": 2e-3},
        "steps": 6,
        "batch_size": 4,
        "mixed_precision": "no",
    }
    return {**base, **fields}


class RecordingTrainer(Trainer):
    """A trainer that keeps its float32 weights, which saving rounds, and can be stopped at a step."""

    stop_at = None

    def _train_step(self):
        if self.step == self.stop_at:
            raise KeyboardInterrupt
        return super()._train_step()

    def save_model(self, evaluation):
        self.final = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        super().save_model(evaluation)


TINY_TARGET = {
    "vocab_size": 8192,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": 8124,
    "pad_token_id": 8124,
}

TINY_DRAFTER = {
    "target_id": "lab/Tiny",
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "block_size": 4,
    "target_layer_ids": [0, 2],
    "mask_token_id": 8125,
    "transfer_rank": 16,
    "message_size": 8,
    "num_candidates": 6,
}


def train_config(corpus, output, target, **fields) -> TrainConfig:
    fields = {
        "data": {
            "train": [{"path": str(corpus / "train.bin")}],
            "eval": [{"path": str(corpus / "eval.bin")}],
            "sequence_length": 32,
        },
        "log_every": 1,
        "eval_every": 3,
        **fields,
    }
    return TrainConfig.model_validate(run_fields(output, target, corpus / "train.bin", **fields))


def drafter_config(corpus, output, target, **fields) -> TrainConfig:
    fields = {
        "model": TINY_DRAFTER,
        "objective": {"anchors": 4},
        "acceptance": {"prompts": str(corpus / "prompts.jsonl"), "count": 2, "max_new_tokens": 6},
        **fields,
    }
    return train_config(corpus, output, target, **fields)


def causal_config(corpus, output, **fields) -> TrainConfig:
    fields = {"kind": "causal_lm", "model": TINY_TARGET, "optimizer": {"learning_rate": 1e-2}, **fields}
    return train_config(corpus, output, MINI / "target", **fields)


def read_log(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
