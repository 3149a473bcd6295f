"""The benchmark of the operations: its check must be able to fail, and its floor must count what it says."""

import pytest
import torch

from dspine_hub.errors import DSpineHubError
from dspine_hub.evaluation.ops.baselines import cycle
from dspine_hub.evaluation.ops.bench import bench_ops
from dspine_hub.evaluation.ops.correctness import check_round
from dspine_hub.evaluation.ops.round import Shape, random_drafter, random_round, round_cost, run_round

SMALL = Shape(H=64, R=32, M=16, L=2, N=5, K=8, V=200)


@pytest.fixture
def drafter():
    return random_drafter(SMALL, torch.float32, "cpu", seed=0)


def test_a_round_is_checked_against_float64(drafter):
    """Catches a check that compares the kernels with themselves."""
    found = check_round(drafter, random_round(SMALL, 3, torch.float32, "cpu", seed=1))
    assert 0 < found["max_rel_err"] <= 1e-5
    assert found["paths_equal"] == found["blocks"] == 3
    assert found["widest_tie"] == 0


@pytest.mark.parametrize("what", ["predecessors", "write_factor", "head_messages", "layers"])
def test_a_wrong_table_is_not_timed(drafter, what):
    """Catches an operand the check does not reach: a wrong drafter must never get a number."""
    if what == "layers":
        drafter.tables.layers[0].message.mul_(1.01)
        drafter = drafter._replace(layers=random_drafter(SMALL, torch.float32, "cpu", seed=0).layers)
    else:
        table = getattr(drafter.tables, what)
        (table if what == "write_factor" else table.values).mul_(1.01)
    with pytest.raises(DSpineHubError, match=r"`max_rel_err` must be at most 1e-05 in torch.float32"):
        check_round(drafter, random_round(SMALL, 3, torch.float32, "cpu", seed=1))


def test_the_floor_counts_every_weight_once():
    """Catches a floor raised by counting what need not move, which would flatter the result."""
    one, two = round_cost(Shape(), 1), round_cost(Shape(), 2)
    weights = 5 * (1024 * 4096 + 4096 * 512) + 3 * 512 * 1024 + 512 * 512
    request = 2 * 5 * 16 * 4096 + (1 + 14 * 16) * 1024 + 15 * 16 * (4096 + 512)
    assert one["bytes"] == 2 * (weights + request) + 8 * 15 * 256
    assert two["bytes"] - one["bytes"] == 2 * request + 8 * 15 * 256
    assert two["flops"] == 2 * one["flops"]


def test_the_operations_trace_without_a_break(drafter):
    """Catches a wrapper Dynamo cannot follow: `fullgraph` must hold where no kernel runs, too."""
    inputs = random_round(SMALL, 2, torch.float32, "cpu", seed=1)
    compiled = torch.compile(lambda one: run_round(drafter, one)[1:3], fullgraph=True, backend="aot_eager")
    for mine, theirs in zip(compiled(inputs), run_round(drafter, inputs)[1:3], strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_cycle_drafts_and_verifies():
    """Catches a cycle that cannot be built, or that leaves out the candidates or the verification it is named for."""
    candidates, own = cycle(SMALL, 2, device="cpu", target_layers=3)()
    assert candidates.shape == (2, 4, 8)
    assert own.shape == (2, 5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_are_no_numbers():
    """Catches a time measured on a CPU and read as one of a GPU."""
    with pytest.raises(DSpineHubError, match=r"`bench ops` needs a CUDA device and Triton, got none"):
        bench_ops()
