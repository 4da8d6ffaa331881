"""The rule by which modules run in the compiled kernels: only what is on a closed list does.

A module's code looks up listed names and compares nothing, so that what was tried with a few numbers holds for all.
For whatever else there is, the model's own code runs. At each call arguments are listed ones (dense.py), and tensors
plain (native/kernels.py).
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Set
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import repeat_kv

from expertly.model.hooks import look_alike

_MODULES = {"torch": torch.__name__, "nn": nn.__name__, "F": functional.__name__}
_PACKAGES = (torch.__name__, transformers.__name__)

ARITHMETIC = {"torch", "nn", "F", "functional", "linear", "softmax", "sigmoid", "tanh", "logsumexp", "matmul", "cat"}
ARITHMETIC |= {"pow", "mean", "rsqrt", "rms_norm", "sum", "topk", "stack", "chunk", "gather"}
ARITHMETIC |= {"shape", "size", "reshape", "view", "flatten", "expand", "unsqueeze", "transpose", "contiguous"}
ARITHMETIC |= {"dtype", "float", "float32", "bool", "to", "type", "type_as", "device", "maybe_autocast"}
"""Names of torch that do the same to all numbers at any time, so that a few show it: no bounds, no conditions."""


def does_only(function: Any, names: Set[str], kind: type = object, apart: Set[str] = frozenset()) -> bool:
    """Whether the code of a function, or of a method of `kind`, looks up nothing but `names`, compares no values and
    calls no function that does; those in `apart` are not looked into.
    """
    plain = undecorated(function)
    if plain is None:
        return False
    code = plain.__code__
    if not set(code.co_names) <= names or code.co_freevars or any(isinstance(it, CodeType) for it in code.co_consts):
        return False
    if _compares(code):
        return False
    for name in set(code.co_names) - apart:
        member = plain.__globals__.get(name, getattr(kind, name, None))
        if name in _MODULES and getattr(member, "__name__", None) != _MODULES[name]:
            return False
        if isinstance(member, FunctionType) and not _is_known(member, names, kind):
            return False
    return True


@cache
def _compares(code: CodeType) -> bool:
    return any(step.opname in ("COMPARE_OP", "CONTAINS_OP") for step in dis.get_instructions(code))


def _is_known(function: FunctionType, names: Set[str], kind: type) -> bool:
    """A method of all modules, whose name is a tensor's too, a helper of transformers' library, a copy of `repeat_kv`
    (which compares a count), or code that does only this.
    """
    if function is getattr(nn.Module, function.__name__, None):
        return True
    if function.__module__.startswith(f"{transformers.__name__}.utils."):
        return True
    code, known = function.__code__, repeat_kv.__code__
    is_copy = (code.co_code, code.co_names) == (known.co_code, known.co_names)
    return (is_copy and code.co_consts[1:] == known.co_consts[1:]) or does_only(function, names, kind)


def undecorated(function: Any) -> FunctionType | None:
    """The function within decorators of torch and transformers; None where there is another decorator, or no code."""
    while hasattr(function, "__wrapped__"):
        if not str(getattr(function, "__globals__", {}).get("__name__")).startswith(_PACKAGES):
            return None
        function = function.__wrapped__
    return function if isinstance(function, FunctionType) else None


def takes_one(method: Any) -> bool:
    """Whether it has one argument beside `self`."""
    parameters = inspect.signature(method).parameters.values()
    return [parameter.kind for parameter in parameters] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2


def stand_in(module: Any, kinds: Any = object, **changed: Any) -> None:
    """Change a module's class as `look_alike` does, until somebody sets an attribute of it to something of these kinds:
    what was tried need not hold any more, so its own class returns.
    """
    original: Any = type(module)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name == "__class__":
            object.__setattr__(self, name, value)
            return
        if isinstance(value, kinds) and name != "training" and not name.startswith("_expertly_"):
            object.__setattr__(self, "__class__", original)
        original.__setattr__(self, name, value)

    module.__class__ = look_alike(original, **changed, __setattr__=__setattr__)
