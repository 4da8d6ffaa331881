"""Messages between an engine and its workers: raw bytes, so that no object is pickled for a layer.

A message's first byte is its kind. An answer's first byte says whether the rest is the answer or the reason why there
is none. Numbers are little-endian. Shapes: T tokens, n rows, H hidden.
"""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from expertly.core.messages import RouterRan
from expertly.engine.compute import Dispatch

VERSION = 5
"""Of the messages and of what they ask for. An engine takes only workers of its own."""


class Kind(IntEnum):
    """What a message asks a worker for."""

    HELLO = 0  # its version and free memory; JSON
    OPEN = 1  # hold these experts of this store; JSON
    LAYER = 2  # compute rows
    STATS = 3  # what it holds and has done; JSON


_OK, _FAILED = b"\0", b"\1"


def asking(kind: Kind, told: dict[str, Any] | None = None) -> bytes:
    """A message whose content is JSON."""
    return bytes([kind]) + json.dumps(told or {}).encode()


def told_in(message: bytes) -> Any:
    """The JSON behind the first byte."""
    return json.loads(message[1:])


def answered(content: bytes) -> bytes:
    return _OK + content


def refused(error: BaseException) -> bytes:
    return _FAILED + f"{type(error).__name__}: {error}".encode()


def reason_in(answer: bytes) -> str | None:
    """Why the worker did not do it; None where it did."""
    return answer[1:].decode() if answer[:1] == _FAILED else None


class _Rest:
    """The part of a message that was not read yet."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._at = 1

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        found = form.unpack_from(self._message, self._at)
        self._at += form.size
        return found

    def array(self, dtype: Any, num: int) -> npt.NDArray[Any]:
        found = np.frombuffer(self._message, dtype, num, self._at)
        self._at += found.nbytes
        return found

    def tensor(self, dtype: torch.dtype, num_rows: int) -> torch.Tensor:
        """All that is left, as rows. A copy: the message is read-only."""
        values = bytearray(memoryview(self._message)[self._at :])
        if not num_rows:
            return torch.empty(0, 0, dtype=dtype)
        return torch.frombuffer(values, dtype=dtype).view(num_rows, -1)


# -- a layer -----------------------------------------------------------------------------------------------------------

_LAYER = struct.Struct("<BBBIIIIIq")


class LayerAsked(NamedTuple):
    """A worker's part of a layer. `hidden` [T, H] has only the tokens that its experts compute. `begins`: it is the
    worker's first of a forward pass.
    """

    begins: bool
    work: Dispatch
    hidden: torch.Tensor


def layer_message(begins: bool, work: Dispatch, hidden: torch.Tensor) -> bytes:
    """`hidden` [T, H] of all tokens, in host memory and in the dtype of the experts."""
    router = work.router
    tokens = np.empty(0, np.int32)
    counts: list[int] = []
    if work.positions is None:
        assert work.rows is not None
        some = [work.rows[expert] for expert in router.experts] or [torch.empty(0, dtype=torch.int64)]
        of_rows = torch.cat(some).numpy() // work.top_k
        counts = [len(work.rows[expert]) for expert in router.experts]
        needed, places = np.unique(of_rows, return_inverse=True)
        tokens = places.astype(np.int32)
        if len(needed) < len(hidden):
            hidden = hidden[torch.from_numpy(needed)]
        else:
            tokens = of_rows.astype(np.int32)
    elif not router.experts:
        hidden = hidden[:0]
    head = _LAYER.pack(
        begins,
        work.positions is not None,
        router.serves_decode,
        router.layer,
        len(router.experts),
        len(hidden),
        work.num_rows,
        router.batch_tokens,
        len(tokens),
    )
    numbers = np.asarray([*router.experts, *router.num_tokens, *router.is_decode, *counts], np.int32)
    rows = hidden.detach().contiguous().view(torch.uint8).numpy()
    parts: list[Any] = [bytes([Kind.LAYER]), head, numbers, tokens, rows]
    return b"".join(parts)


def layer_in(message: bytes, dtype: torch.dtype) -> LayerAsked:
    rest = _Rest(message)
    begins, is_single, serves_decode, layer, num, num_hidden, num_rows, batch_tokens, num_tokens = rest.unpack(_LAYER)
    experts, counts, is_decode = (rest.array(np.int32, num).tolist() for _ in range(3))
    router = RouterRan(layer, experts, counts, list(map(bool, is_decode)), batch_tokens, bool(serves_decode))
    if is_single:
        positions = {expert: row for row, expert in enumerate(experts)}
        work = Dispatch(router, num, num_rows, True, None, positions)
        return LayerAsked(bool(begins), work, rest.tensor(dtype, num_hidden))
    lengths: list[int] = rest.array(np.int32, num).tolist()
    tokens = torch.from_numpy(rest.array(np.int32, num_tokens).astype(np.int64))
    rows = dict(zip(experts, tokens.split(lengths), strict=True))  # of one choice a token: a row is its token
    places, end = {}, 0
    for expert, length in zip(experts, lengths, strict=True):
        places[expert] = slice(end, end + length)
        end += length
    work = Dispatch(router, 1, num_rows, True, rows, None, places)
    return LayerAsked(bool(begins), work, rest.tensor(dtype, num_hidden))


_RAN = struct.Struct("<qq")


class LayerRan(NamedTuple):
    """A worker's part of a layer that ran."""

    outputs: torch.Tensor  # [n, H]
    waited_ns: int  # for transfers
    took_ns: int


def ran_message(outputs: torch.Tensor, waited_ns: int, took_ns: int) -> bytes:
    parts: list[Any] = [_RAN.pack(waited_ns, took_ns), outputs.contiguous().view(torch.uint8).numpy()]
    return answered(b"".join(parts))


def ran_in(answer: bytes, dtype: torch.dtype, num_rows: int) -> LayerRan:
    rest = _Rest(answer)
    waited_ns, took_ns = rest.unpack(_RAN)
    return LayerRan(rest.tensor(dtype, num_rows), waited_ns, took_ns)
