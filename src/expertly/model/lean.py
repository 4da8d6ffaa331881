"""Imports torch and transformers without parts that no command needs: distributed models, accelerate and the compiler.

They take 85 MiB of a process (docs/log/). This is for the command line, not for `expertly.load` in a user's program,
which may distribute and compile models.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

_ABSENT = (
    *("is_torch_distributed_available", "is_accelerate_available", "is_torch_flex_attn_available"),
    "is_scipy_available",
)
"""Functions by which transformers checks, once a process, for these optional packages before it imports them."""

_DYNAMO = "torch._dynamo"
_INDEXING = "torch._dynamo._trace_wrapped_higher_order_op"
_SHAPES = "torch._meta_registrations"
"""Python's part of the meta device, tensors with shapes and no values: packing needs it, and the compiler."""


def import_lean() -> None:
    """Import transformers without these parts. Does nothing where it is already imported."""
    if "transformers" in sys.modules or _DYNAMO in sys.modules:
        return
    if "torch" not in sys.modules:
        _PutOff(_SHAPES, {})
    import torch

    with contextlib.suppress(ImportError):  # else the first torch.Generator asks for it
        importlib.import_module("torch._prims.rng_prims")
    importlib.import_module("transformers.utils")
    for module in [one for name, one in sys.modules.items() if name.partition(".")[0] == "transformers"]:
        for name in _ABSENT:
            if name in vars(module):
                setattr(module, name, lambda *_, **__: False)
    folder = Path(torch.__file__).parent / "_dynamo"
    _PutOff(_DYNAMO, dict.fromkeys(("disable", "allow_in_graph", "assume_constant_result"), _as_it_is), folder)
    indexing = _PutOff(_INDEXING, {})
    indexing.given["TransformGetItemToIndex"] = lambda: indexing.load().TransformGetItemToIndex()


def import_shapes() -> None:
    """Import what computes shapes on the meta device, where it was put off."""
    module = sys.modules.get(_SHAPES)
    if isinstance(module, _PutOff):
        module.load()


class _PutOff(types.ModuleType):
    """A placeholder for a module with the attributes in `given`; any other attribute imports the real module."""

    def __init__(self, name: str, given: dict[str, Callable[..., Any]], folder: Path | None = None) -> None:
        super().__init__(name)
        self.given = given
        self.__spec__ = ModuleSpec(name, None, is_package=folder is not None)
        if folder is not None:
            self.__path__ = [str(folder)]
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return self.given[name] if name in self.given else getattr(self.load(), name)

    def load(self) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        if self.__name__ == _DYNAMO:
            import_shapes()
        return importlib.import_module(self.__name__)


def _as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    """Takes the place of decorators that only inform the compiler."""
    return _as_it_is if function is None else function
