"""A load in a fresh process: no noise in a buffer, no name of somebody else's, copies that carry their code."""

import json
import os

import pytest
import torch
import transformers
from helpers.processes import run
from helpers.tiny import tiny_bundle
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.models.auto import configuration_auto, modeling_auto

from dspine_hub import modeling_dspine
from dspine_hub.configuration_dspine import DSpineConfig
from dspine_hub.modeling_dspine import DSpineForSpeculation
from dspine_hub.publish.shipped import AUTO_MAP, SHIPPED

# loads folders in a fresh process that hides this package; writes buffers, stray tensors and a copy of each
LOADER = """
import json, sys
sys.modules["dspine_hub"] = None
import torch
from safetensors.torch import save_file
from transformers import AutoModel
torch.set_num_threads(1)
source, copy = sys.argv[1:]
report = {}
for storage in ("codes", "basis"):
    drafter = AutoModel.from_pretrained(f"{source}/{storage}", trust_remote_code=True)
    save_file({name: buffer.clone() for name, buffer in drafter.named_buffers()}, f"{copy}-{storage}.safetensors")
    stray = [key for part in drafter.modules() for key, value in vars(part).items() if torch.is_tensor(value)]
    report[storage] = {"module": type(drafter).__module__.split(".")[0], "stray": stray}
    drafter.save_pretrained(f"{copy}/{storage}")
print(json.dumps(report))
"""


def load_fresh(source, copy, home):
    # another value than zero in unfilled memory, where the allocator is glibc's
    env = {**os.environ, "PYTHONPATH": "", "HF_MODULES_CACHE": str(home), "MALLOC_PERTURB_": "165"}
    return run(LOADER, source, copy, env=env, cwd=home.parent)


@pytest.fixture(scope="module")
def fresh(target, tmp_path_factory):
    """Bundles of both storages, what a fresh process loads, and what another loads of its copies."""
    place = tmp_path_factory.mktemp("fresh")
    for storage in ("codes", "basis"):
        tiny_bundle(target, place / "bundle" / storage, transfer_storage=storage)
    first = load_fresh(place / "bundle", place / "copy", place / "home")
    (place / "bundle").rename(place / "moved")
    second = load_fresh(place / "copy", place / "copy-of-copy", place / "other-home")
    return place, {"copy": first, "copy-of-copy": second}


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["codes", "basis"])
@pytest.mark.parametrize("name", ["copy", "copy-of-copy"], ids=["loaded", "saved-and-loaded"])
def test_every_buffer_of_a_fresh_load_equals_a_built_one(fresh, name, storage):
    """Catches buffers that `__init__` fills and a load leaves as noise (transformers#48892), persistent or not."""
    place, reports = fresh
    folder = place / "moved" / storage
    built = DSpineForSpeculation(DSpineConfig.from_pretrained(folder))
    built.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    expected, found = dict(built.named_buffers()), load_file(place / f"{name}-{storage}.safetensors")
    assert set(found) == set(expected)
    for key, buffer in expected.items():
        assert torch.equal(found[key].to(buffer.dtype), buffer), key
    assert reports[name][storage] == {"module": "transformers_modules", "stray": []}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["copy", "copy-of-copy"])
def test_a_saved_copy_carries_its_own_code(fresh, name):
    """Catches a re-saved model without its code, or with an `auto_map` into its origin (transformers#24737)."""
    place, _ = fresh
    for storage in ("codes", "basis"):
        assert json.loads((place / name / storage / "config.json").read_text())["auto_map"] == AUTO_MAP
        for file, source in SHIPPED.items():
            # `custom_generate/` is no part of the model's own code
            if "/" not in file:
                assert (place / name / storage / file).read_bytes() == source.read_bytes(), file


MODELS = [
    value
    for value in vars(modeling_dspine).values()
    if isinstance(value, type) and issubclass(value, PreTrainedModel) and value is not PreTrainedModel
]


@pytest.mark.parametrize("model", MODELS)
def test_ties_are_a_dictionary_or_absent(model):
    """Catches the list of transformers 4: `'list' object has no attribute 'keys'` (transformers#44861)."""
    assert isinstance(getattr(model, "_tied_weights_keys", None), dict | None)


def test_post_init_has_run(drafter):
    """Catches a constructor that ends without it: no load works then (transformers#43883)."""
    assert drafter.all_tied_weights_keys == {}


def test_names_are_nobody_elses():
    """Catches an architecture or model type under which a loader builds another class (vllm#52197)."""
    assert DSpineForSpeculation.__name__ == "DSpineForSpeculation" and not hasattr(
        transformers, "DSpineForSpeculation"
    )
    assert DSpineConfig.model_type not in configuration_auto.CONFIG_MAPPING_NAMES
    tables = {name: table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")}
    assert len(tables) > 10
    assert not [name for name, table in tables.items() if "DSpine" in str(table.values())]
