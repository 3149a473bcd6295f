"""A bundle loaded in a fresh process that cannot import this package."""

import os
from pathlib import Path

from helpers.overlays import OVERLAY_FOLDER
from helpers.paths import MINI
from helpers.processes import run

NEWEST = "installed"

# runs in a fresh process: the package hidden, an empty module cache, one transformers release
LOADER = """
import json, sys
bundle, target_folder, hidden = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
for name in hidden:
    sys.modules[name] = None
import torch, transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(target_folder)
target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
drafter = AutoModel.from_pretrained(bundle, trust_remote_code=True, dtype=torch.float32)
ids = tokenizer("def add(a, b):\\n", return_tensors="pt")["input_ids"]
plain = target.generate(ids, max_new_tokens=24, do_sample=False)
drafted = drafter.bind(target, tokenizer).spec_generate(
    target, ids, 24, temperature=0.0, return_dict_in_generate=True)
custom = target.generate(ids, max_new_tokens=24, do_sample=False, custom_generate=bundle, drafter=drafter,
    trust_remote_code=True)
stock = None
if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 17):
    stock = torch.equal(plain, target.generate(
        ids, max_new_tokens=24, do_sample=False, assistant_model=drafter, speculation_type="dflash"))
print(json.dumps({
    "version": transformers.__version__,
    "module": type(drafter).__module__.split(".")[0],
    "spec_generate": torch.equal(plain, drafted.sequences),
    "custom_generate": torch.equal(plain, custom),
    "stock": stock,
    "lengths": drafted.statistics.lengths,
}))
"""


def run_loader(bundle, tmp_path, version, hidden=("dspine_hub",)):
    path = [] if version == NEWEST else [str(Path(OVERLAY_FOLDER).resolve() / version)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_HUB_OFFLINE": "1",
    }
    return run(LOADER, bundle, MINI / "target", ",".join(hidden), env=environment, cwd=tmp_path)
