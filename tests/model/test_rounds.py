"""Rounds of the loop: how many rows a block has, and what is rolled back after it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.overlays import OVERLAY_FOLDER, OVERLAYS
from helpers.paths import ROOT
from helpers.scripted import drafts_with_errors
from helpers.tiny import build_drafter
from transformers import DynamicCache

PROMPT = [3, 1, 4, 15, 92]


@pytest.mark.parametrize("size", [2, 5])
def test_a_block_counts_its_anchor(target, taps, size):
    """Catches the other convention, with which acceptance falls to 1 and nothing fails (sglang#40144)."""
    drafter = build_drafter(target, block_size=size)
    assert drafter.draft(taps(PROMPT, drafter), torch.tensor([7])).tokens.shape == (1, size - 1)
    rows = []
    text = target.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)[0].tolist()
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    try:
        output = drafter.spec_generate(target, torch.tensor([PROMPT]), 8, temperature=0, return_dict_in_generate=True)
    finally:
        handle.remove()
    assert output.sequences[0].tolist() == text and output.statistics.slots == size - 1
    # the target judges the whole block at once, and its first row is the last committed token
    assert rows[0] == PROMPT and all(len(block) == size for block in rows[1:])
    assert rows[1][0] == text[len(PROMPT)]


def test_caches_are_rolled_back_by_negative_counts_only(target, drafter, script, monkeypatch):
    """Catches a count that releases read differently: 0 kept no row in 5.12, positive ones changed twice."""
    plan, counts, lengths = [4, 0, 2, 4, 4, 1], [], []
    text = target.generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False)[0].tolist()
    scripted = script(drafter, drafts_with_errors(text, plan, 4, 97), PROMPT)
    real = DynamicCache.crop

    def crop(cache, count):
        real(cache, count)
        counts.append(count)
        # the text before the anchor, the anchor, and what was accepted of the block
        lengths.append(cache.get_seq_length() - len(scripted.text) - 1 - plan[(scripted.calls - 1) % len(plan)])

    monkeypatch.setattr(DynamicCache, "crop", crop)
    output = drafter.spec_generate(target, torch.tensor([PROMPT]), 20, temperature=0, return_dict_in_generate=True)
    assert output.sequences[0].tolist() == text[: len(PROMPT) + 20]
    assert output.statistics.accepted[:4] == plan[:4] and lengths == [0] * len(counts)
    assert {-4, -2} <= set(counts) and max(counts) < 0


WHOLE_BLOCKS = """
import sys
import torch, transformers
from helpers.scripted import ScriptedDraft, drafts_with_errors
from helpers.tiny import build_drafter, build_target
torch.set_num_threads(1)
target = build_target()
drafter, prompt = build_drafter(target), [3, 1, 4, 15, 92]
text = target.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0].tolist()
drafter.draft = ScriptedDraft(drafter, drafts_with_errors(text, [4, 4, 1], 4, 97), prompt)
found = drafter.spec_generate(target, torch.tensor([prompt]), 20, temperature=0, return_dict_in_generate=True)
assert transformers.__version__ == sys.argv[1]
assert found.sequences[0].tolist() == text[: len(prompt) + 20]
assert found.statistics.accepted[:3] == [4, 4, 1], found.statistics.accepted
"""


@pytest.mark.overlay
@pytest.mark.skipif(OVERLAY_FOLDER is None, reason="needs DSPINE_OVERLAYS, see tests/helpers/overlays.py")
@pytest.mark.parametrize("version", OVERLAYS)
def test_blocks_accepted_whole_keep_the_text_on_every_supported_transformers(version):
    """Catches a rollback by 0 rows, which once meant `keep 0 rows`: the text is no longer the target's."""
    path = [str(Path(OVERLAY_FOLDER).resolve() / version), str(ROOT), str(ROOT / "tests")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", WHOLE_BLOCKS, version]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-2000:]
