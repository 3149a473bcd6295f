"""Training data: the order of sequences, three file formats, and files that are refused."""

import json

import numpy as np
import pytest
import torch

from dspine_hub.errors import DSpineHubError
from dspine_hub.training.config import DataConfig, SourceConfig
from dspine_hub.training.data import Sequences, step_indices


def test_step_indices_visit_every_sequence_once_an_epoch():
    """Catches a tail that is dropped at the epoch's end and a shuffle that repeats from epoch to epoch."""
    stream = np.concatenate([step_indices(7, 3, step, seed=4) for step in range(14)])
    epochs = stream.reshape(6, 7)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(7))
    assert len({tuple(epoch) for epoch in epochs.tolist()}) > 1


def test_step_indices_are_a_function_of_seed_and_step():
    """A resumed run must see the batches of an unbroken one, whatever was asked before."""
    steps = [step_indices(50, 8, step, seed=4).tolist() for step in range(20)]
    np.random.seed(0)
    for step in (13, 0, 19, 6):
        assert step_indices(50, 8, step, seed=4).tolist() == steps[step]
    assert [step_indices(50, 8, step, seed=5).tolist() for step in range(20)] != steps


def test_step_indices_of_a_batch_larger_than_the_data():
    """Catches an index past the end where one batch holds several epochs."""
    indices = step_indices(3, 10, 0, seed=0)
    assert [sorted(indices[i : i + 3].tolist()) for i in (0, 3, 6)] == [[0, 1, 2]] * 3


def sequences(paths, tokenizer=None, length=4, repeat=1, **fields):
    sources = [SourceConfig(path=path, repeat=repeat) for path in paths]
    config = DataConfig(train=sources, sequence_length=length, **fields)
    return Sequences(sources, config, tokenizer)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_bin_is_cut_into_consecutive_sequences(tmp_path, dtype):
    """Catches a wrong token width, a tail kept in part, and ids left in an unsigned type."""
    np.arange(60_000, 60_011, dtype=dtype).tofile(tmp_path / "a.bin")
    data = sequences([tmp_path / "a.bin"], token_dtype=dtype)
    ids, mask = data.batch(np.array([1, 0]))
    assert len(data) == 2
    assert ids.tolist() == [[60_004, 60_005, 60_006, 60_007], [60_000, 60_001, 60_002, 60_003]]
    assert ids.dtype == torch.int64 and mask.dtype == torch.bool and bool(mask.all())


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64])
def test_npz_is_cut_to_length_with_a_boolean_mask(tmp_path, dtype):
    """Masks are often stored as 0 and 1: an integer one fails in the middle of the first step, far from its file."""
    rows, mask = np.arange(12).reshape(2, 6), np.array([[0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 1, 1]], dtype=dtype)
    np.savez(tmp_path / "a.npz", input_ids=rows, loss_mask=mask)
    ids, found = sequences([tmp_path / "a.npz"]).batch(np.array([0, 1]))
    assert ids.tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert found.dtype == torch.bool
    assert found.tolist() == [[False, False, True, True], [True, False, True, False]]


def test_jsonl_supervises_the_completion_and_its_end(tmp_path, tokenizer):
    """Catches a supervised prompt or padding, and a missing end token."""
    prompt, completion = "def add(a, b):\n", "    return a + b\n"
    records = [{"text": prompt}, {"prompt": prompt, "completion": completion}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    ids, mask = sequences([tmp_path / "a.jsonl"], tokenizer, length=40).batch(np.array([0, 1]))
    first, second = tokenizer(prompt)["input_ids"], tokenizer(completion)["input_ids"]
    end = tokenizer.eos_token_id
    assert 0 < len(first) + len(second) < 39
    assert ids[0].tolist() == first + [end] * (40 - len(first))
    assert mask[0].tolist() == [True] * (len(first) + 1) + [False] * (39 - len(first))
    assert ids[1].tolist() == first + second + [end] * (40 - len(first) - len(second))
    rest = 39 - len(first) - len(second)
    assert mask[1].tolist() == [False] * len(first) + [True] * (len(second) + 1) + [False] * rest


def test_jsonl_cuts_long_records(tmp_path, tokenizer):
    """Catches ragged rows, and a mask that is not cut with its row."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "x = 1\n" * 9, "completion": "y = 2\n" * 9}))
    ids, mask = sequences([tmp_path / "a.jsonl"], tokenizer, length=8).batch(np.array([0]))
    assert ids[0].tolist() == tokenizer("x = 1\n" * 9)["input_ids"][:8] and not mask.any()


def test_jsonl_lines_end_at_newlines_only(tmp_path, tokenizer):
    """U+2028 and U+0085 are legal inside a JSON string: splitting there breaks a valid file."""
    text = "a = 'x\u2028y\u0085z'\n"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    data = sequences([tmp_path / "a.jsonl"], tokenizer, length=40)
    ids = tokenizer(text)["input_ids"]
    assert data.batch(np.array([0]))[0][0, : len(ids)].tolist() == ids


def test_sources_are_concatenated_and_repeated(tmp_path):
    """Catches a repeat that counts the next source's rows, and offsets that run on from source to source."""
    np.arange(0, 8, dtype="uint16").tofile(tmp_path / "a.bin")
    np.arange(100, 104, dtype="uint16").tofile(tmp_path / "b.bin")
    sources = [SourceConfig(path=tmp_path / "a.bin", repeat=2), SourceConfig(path=tmp_path / "b.bin", repeat=3)]
    data = Sequences(sources, DataConfig(train=sources, sequence_length=4), None)
    ids, _ = data.batch(np.arange(len(data)))
    assert ids[:, 0].tolist() == [0, 4, 0, 4, 100, 100, 100]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("gone.bin", None, r"`data`.*`.*gone\.bin`", id="missing"),
        pytest.param("a.txt", b"text", r"`data` files must end in .*`.*a\.txt`", id="suffix"),
        pytest.param("a.bin", b"\x01\x00" * 3, r"`data` must hold .* 4 tokens.*a\.bin", id="short"),
        pytest.param("a.bin", b"", r"a\.bin", id="empty-bin"),
        pytest.param("a.jsonl", b"", r"`data` must hold .*a\.jsonl", id="empty-jsonl"),
        pytest.param("a.jsonl", b'{"text": "x"}\n{"prompt": "y"}\n', r"`.*a\.jsonl` line 2 .*prompt", id="no-text"),
        pytest.param("a.jsonl", b'{"text": "x"}\n{"text": \n', r"`.*a\.jsonl` line 2", id="broken-json"),
        pytest.param("a.jsonl", b"3\n", r"`.*a\.jsonl` line 1", id="json-but-no-object"),
        pytest.param("a.jsonl", b'{"text": 3}\n', r"`.*a\.jsonl` line 1", id="text-is-no-string"),
    ],
)
def test_bad_data_is_refused_by_name(tmp_path, tokenizer, name, content, message):
    """A user's file is a user's error: it must name file and line, and never end in a traceback."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DSpineHubError, match=message):
        sequences([tmp_path / name], tokenizer)


def test_short_npz_rows_are_refused_by_name(tmp_path):
    """Rows shorter than the sequences would be cut to nothing, or be ragged with another file's."""
    np.savez(tmp_path / "a.npz", input_ids=np.zeros((2, 3), int), loss_mask=np.ones((2, 3), bool))
    with pytest.raises(DSpineHubError, match=r"`.*a\.npz` must hold rows of at least 4 tokens, got 3"):
        sequences([tmp_path / "a.npz"])
