"""One answer to "which implementation runs here?", asked per call and never at import."""

import os

try:
    import triton
except ImportError:
    triton = None


def use_triton(x) -> bool:
    """Tell whether a Triton kernel can run on `x`.

    Installed is not the same as able to run: without a GPU driver a launch fails, so the tensor's device decides,
    or the interpreter when `TRITON_INTERPRET=1` asks for it.

    Args:
        x (`torch.Tensor` of any shape): The operand that would be handed to the kernel.

    Returns:
        `bool`: `True` when Triton is importable and `x` lives on a CUDA device or the interpreter is switched on.
    """
    if triton is None:
        return False
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
