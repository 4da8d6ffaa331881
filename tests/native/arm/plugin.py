"""A pytest plugin: compiled code runs in an emulator of another processor, over shared memory (`make test-arm`)."""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expertly.engine import transfer
from expertly.formats.gguf import grids
from expertly.native import kernels

_CALL = struct.Struct("64s20q2d")  # call_t of shared.h


class Emulated:
    """A process of `$EXPERTLY_EMULATED`, an emulator with its arguments and the program of caller.c."""

    def __init__(self) -> None:
        self._path = Path(tempfile.mkdtemp()) / "calls"
        words = [*os.environ["EXPERTLY_EMULATED"].split(), str(self._path), str(os.getpid())]
        self._process = subprocess.Popen(words, env={"PATH": os.environ["PATH"]})
        atexit.register(self._process.kill)
        while not self._path.exists():
            assert self._process.poll() is None, "the emulated process has ended"
            time.sleep(0.01)
        self._of_thread = threading.local()

    def function(self, name: str, result: Any, arguments: Sequence[Any]) -> Callable[..., Any]:
        """`name` of the compiled code, called as ctypes would call it."""
        is_double = [argument is ctypes.c_double for argument in arguments]
        result_nbytes = 0 if result is None else ctypes.sizeof(result)

        def call(*values: Any) -> Any:
            assert len(values) == len(arguments), name
            integers = [int(value or 0) for value, double in zip(values, is_double, strict=True) if not double]
            doubles = [value for value, double in zip(values, is_double, strict=True) if double]
            integers += [0] * (20 - len(integers))
            connection = self._connection()
            connection.sendall(_CALL.pack(name.encode(), *integers, *doubles, *[0.0] * (2 - len(doubles))))
            answer = connection.recv(8, socket.MSG_WAITALL)
            assert len(answer) == 8, f"{name}: the emulated process has ended"
            return result.from_buffer_copy(answer[:result_nbytes]).value if result_nbytes else None

        return call

    def functions(self, functions: Mapping[str, tuple[Any, Sequence[Any]]]) -> SimpleNamespace:
        made = {name: self.function(f"expertly_{name}", *kinds) for name, kinds in functions.items()}
        return SimpleNamespace(**made)

    def _connection(self) -> socket.socket:
        if not hasattr(self._of_thread, "connection"):
            self._of_thread.connection = socket.socket(socket.AF_UNIX)
            self._of_thread.connection.connect(str(self._path))
        connection: socket.socket = self._of_thread.connection
        return connection


def products(emulated: Emulated) -> list[kernels.Library]:
    """The products of the emulated processor, by instruction set, the fastest first."""
    assert emulated.function("expertly_products_version", ctypes.c_int, ())() == kernels.VERSION
    tables = ctypes.create_string_buffer(grids(), len(grids()))
    take = emulated.function("expertly_products_grids", ctypes.c_int, (ctypes.c_void_p, ctypes.c_int64))
    assert not take(ctypes.addressof(tables), len(tables))
    call = emulated.functions(kernels.FUNCTIONS)
    is_there = emulated.function("expertly_products_name", ctypes.c_int64, (ctypes.c_int,))
    names = {1: "neon", 0: "generic"}
    dtypes = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
    assert all(is_there(level) and call.products_has_half(level) for level in names)
    return [kernels.Library(name, level, dtypes, call) for level, name in names.items()]


_emulated = Emulated()
_libraries, _readers = products(_emulated), _emulated.functions(transfer._FUNCTIONS)
kernels.libraries = lambda: _libraries
transfer.library = lambda: _readers


_LEFT_OUT = ("fork", "bypass", "given_back", "[a task-", "[many-", "(2, 3, 3)", "(4, 5, 2)", "(1, 90, 3)", "by_itself")
_TOKENS = {1, 3, 5}


def _is_short(item: pytest.Item) -> bool:
    values = getattr(getattr(item, "callspec", None), "params", {})
    return values.get("num_tokens", 1) in _TOKENS and not any(word in item.name for word in _LEFT_OUT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests that replace functions of this process, or count or fork its threads, and what takes the emulator
    minutes: of the products of a format all but small matrices and few tokens.
    """
    of_this_process = {"make", "way", "number"}
    others = [item for item in items if not of_this_process & set(getattr(item, "fixturenames", ()))]
    items[:] = [item for item in others if _is_short(item)]
