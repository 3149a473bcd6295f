"""Changes to a checkpoint on disk, each a mistake that somebody published."""

import json
import shutil

import torch
from helpers import checkpoints
from safetensors.torch import load_file, save_file


def weights(change, name="model.safetensors"):
    """Change the tensors of a file."""

    def apply(folder):
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name, metadata={"format": "pt"})

    return apply


def config(**changes):
    """Change keys of the config; a double underscore reaches into an object, `None` removes the key."""

    def apply(folder):
        path = folder / "config.json"
        fields = json.loads(path.read_text())
        for key, value in changes.items():
            *parents, last = key.split("__")
            node = fields
            for parent in parents:
                node = node[parent]
            node.pop(last, None)
            if value is not None:
                node[last] = value
        path.write_text(json.dumps(fields))

    return apply


def poison(tensors):
    tensors["fc.weight"][3, 5] = float("nan")


def transpose(tensors):
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous()


def shorten(tensors):
    tensors["transfer_codes"] = tensors["transfer_codes"][:90].clone()


def nest(folder):
    path = folder / "config.json"
    path.write_text(json.dumps({"config": json.loads(path.read_text())}))


def shard(folder):
    tensors = load_file(folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    shutil.rmtree(folder)
    checkpoints.write_sharded(folder, fields, tensors)


def cut(folder):
    shard(folder)
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lose(folder):
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def misplace(folder):
    shard(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["fc.weight"] = "model-00002-of-00002.safetensors"
    path.write_text(json.dumps(index))


def twice(folder):
    save_file({"fc.weight": load_file(folder / "model.safetensors")["fc.weight"]}, folder / "more.safetensors")


def pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def add_head(tensors):
    tensors["lm_head.weight"] = torch.zeros(97, 32)


def tie(folder):
    weights(add_head)(folder)
    config(tie_word_embeddings=True)(folder)
