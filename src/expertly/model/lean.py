"""Imports transformers without what no command of ours runs: distributed models, accelerate and the compiler.

These tails take 75 MiB of a process (docs/log.md). For a process that is ours from its first line to its last: the
command line, not `expertly.load` in somebody's program, who may distribute and compile what he likes.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch

_ABSENT = ("is_torch_distributed_available", "is_accelerate_available", "is_torch_flex_attn_available")
"""What transformers asks before it imports these, once a process; each may be missing, says transformers."""

_DYNAMO = "torch._dynamo"
_INDEXING = "torch._dynamo._trace_wrapped_higher_order_op"


def import_lean() -> None:
    """Import transformers so. Does nothing where it has been imported by now."""
    if "transformers" in sys.modules or _DYNAMO in sys.modules:
        return
    importlib.import_module("transformers.utils")
    for module in [one for name, one in sys.modules.items() if name.partition(".")[0] == "transformers"]:
        for name in _ABSENT:
            if name in vars(module):
                setattr(module, name, _no)
    folder = Path(torch.__file__).parent / "_dynamo"
    _PutOff(_DYNAMO, dict.fromkeys(("disable", "allow_in_graph", "assume_constant_result"), _as_it_is), folder)
    indexing = _PutOff(_INDEXING, {})
    indexing.given["TransformGetItemToIndex"] = lambda: indexing.load().TransformGetItemToIndex()


class _PutOff(types.ModuleType):
    """Stands for a module until something else is asked of it than what is `given`: then that is imported."""

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
        return importlib.import_module(self.__name__)


def _no(*_: Any, **__: Any) -> bool:
    return False


def _as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    """Of decorators that tell something to the compiler."""
    return _as_it_is if function is None else function
