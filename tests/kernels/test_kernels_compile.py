"""The kernels compiled for an H100 or H200 at the sizes of an 8B drafter, on a machine without a GPU: nothing runs."""

import dataclasses
import os
import pkgutil
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

import dspine_hub.kernels_dspine
from dspine_hub.evaluation.ops.round import Shape, random_drafter, random_round, run_round
from dspine_hub.kernels_dspine import (
    BackboneLogits,
    adjacent_injection,
    top_candidates,
    transition_scores,
    triton_support,
)

pytestmark = pytest.mark.skipif(
    triton_support.triton is None or torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton; a GPU or the interpreter runs the kernels instead",
)

# what a program may use of a Hopper device
SHARED_MEMORY, THREADS = 232_448, 1024
PACKAGE = dspine_hub.kernels_dspine
MODULES = [import_module(f"{PACKAGE.__name__}.{module.name}") for module in pkgutil.iter_modules(PACKAGE.__path__)]
KERNELS = {name: kernel for module in MODULES for name, kernel in vars(module).items() if name.endswith("_kernel")}


@pytest.fixture
def compiled(monkeypatch):
    """Put a driver in place that names a Hopper device and launches nothing; returns names of what was compiled."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    names = set()

    def load(name, binary, shared, device):
        assert shared <= SHARED_MEMORY and len(binary) > 0
        names.add(name)
        return object(), object(), 0, 0, THREADS

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY},
        load_binary=load,
        unload_module=lambda module: None,
    )
    stand_in = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=lambda source, metadata: lambda *arguments: None,
        utils=utils,
    )
    monkeypatch.setattr(type(driver), "active", stand_in)
    monkeypatch.setattr(triton_support, "can_launch", lambda x: True)
    monkeypatch.setattr(triton_support, "can_overlap", lambda x: True)
    for kernel in KERNELS.values():
        kernel.device_caches.clear()
    yield names
    for kernel in KERNELS.values():
        kernel.device_caches.clear()


def compile_round(batch, dtype):
    """Launch a round's kernels, and those of heads without a table or without rows."""
    shape = Shape(L=2, V=4096)
    drafter, inputs = random_drafter(shape, dtype, "cpu", seed=0), random_round(shape, batch, dtype, "cpu", seed=0)
    run_round(drafter, inputs)
    state, rest = inputs.states[-1][:, 1:], (inputs.candidates, inputs.anchor)
    transition_scores(state, *rest, dataclasses.replace(drafter.tables, head_messages=None))
    injected = adjacent_injection(inputs.states[-1], inputs.anchor, 1, drafter.tables)
    backbone = BackboneLogits(torch.zeros(rest[0].shape), injected.message[:, 1:], injected.hidden[:, 1:].norm(dim=-1))
    transition_scores(state, *rest, drafter.tables, injected.projection.slots(), backbone)
    top_candidates(torch.zeros(batch, 15, 4096, dtype=dtype), 16)


@pytest.mark.parametrize("batch", [1, *(pytest.param(batch, marks=pytest.mark.slow) for batch in (4, 8, 16, 64))])
def test_every_kernel_compiles_for_hopper(compiled, batch):
    """Catches what the interpreter takes and the compiler does not, and tiles beyond a device's shared memory."""
    compile_round(batch, torch.bfloat16)
    without = {"_halves_kernel", "_message_kernel"} if batch <= 4 else {"_readout_kernel", "_gate_kernel"}
    assert compiled == KERNELS.keys() - without


@pytest.mark.parametrize("batch", [1, 5])
def test_kernels_compile_where_numbers_come_as_float64(compiled, monkeypatch, batch):
    """Catches a local that changes its type: Inductor hands Python's numbers to a kernel in float64."""
    triton = triton_support.triton

    class WideNumbers(triton.compiler.ASTSource):
        def __init__(self, fn, signature, *args, **kwargs):
            wide = {name: "fp64" if kind == "fp32" else kind for name, kind in signature.items()}
            super().__init__(fn, wide, *args, **kwargs)

    monkeypatch.setattr(triton.compiler, "ASTSource", WideNumbers)
    compile_round(batch, torch.bfloat16)
    assert {"_scores_kernel", "_gate_kernel" if batch == 1 else "_message_kernel"} < compiled


def test_float32_compiles_for_hopper(compiled):
    """Catches operands of two dtypes in one product: in float32 nothing is split in two."""
    compile_round(2, torch.float32)
    assert compiled == KERNELS.keys() - {"_halves_kernel", "_message_kernel"}


@pytest.mark.parametrize("batch", [2, 5])
def test_launches_trace_without_a_break(compiled, monkeypatch, batch):
    """Catches a wrapper Dynamo cannot follow to its kernels; their results are compared where a GPU runs them."""
    # Dynamo asks for a device before it knows a kernel
    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda: True)
    shape = Shape(H=256, R=128, M=64, L=2, V=500)
    drafter = random_drafter(shape, torch.bfloat16, "cpu", seed=0)
    inputs = random_round(shape, batch, torch.bfloat16, "cpu", seed=0)
    work = torch.compile(lambda one: run_round(drafter, one)[1:3], fullgraph=True, backend="aot_eager")
    scores, tokens = work(inputs)
    assert scores.shape == (batch, 15, 16, 16) and tokens.shape == (batch, 15)
    assert {"_length_kernel", "_scores_kernel", "_walk_kernel"} < compiled
