"""Import-only stand-in for torchvision, whose published build does not load beside a CPU build of torch.

Every submodule and name exists and nothing can be called.
"""

import importlib.abc
import importlib.machinery
import sys

__version__ = "0.0.0"


class _Missing:
    NEAREST = BILINEAR = BICUBIC = LANCZOS = NEAREST_EXACT = BOX = HAMMING = UNCHANGED = RGB = None

    def __init__(self, *args, **kwargs):
        raise RuntimeError("torchvision has no stand-in.")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Missing,), {})


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = __getattr__


sys.meta_path.insert(0, _Submodules())
