"""Messages between an engine and its workers: a kind, a header in JSON and raw bytes, so that no object is pickled.

An answer has the same form; its kind says whether it is the answer or the reason why there is none. Shapes: T tokens,
n rows, H hidden.
"""

from __future__ import annotations

import json
from dataclasses import fields
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from expertly.core.messages import RouterRan
from expertly.engine.compute import Dispatch

VERSION = 7
"""Of the messages and of what they ask for. An engine takes only workers of its own."""


class Kind(IntEnum):
    """A message's first byte: what it asks a worker for, or how it answers."""

    HELLO = 0  # its version and free memory
    OPEN = 1  # hold these experts of this store
    LAYER = 2  # compute rows
    STATS = 3  # what it holds and has done
    DONE = 4
    FAILED = 5


class WorkerFailedError(Exception):
    """A worker's own reason for not doing what it was asked for."""


_HEADER_AT = 5  # behind the kind and the header's length
_ROUTER = [field.name for field in fields(RouterRan)]


def message(kind: Kind, header: dict[str, Any], *content: Any) -> bytes:
    """`content`: whatever has bytes."""
    text = json.dumps(header).encode()
    return b"".join([bytes([kind]), len(text).to_bytes(_HEADER_AT - 1, "little"), text, *content])


def parts_of(message: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the raw bytes. Raises WorkerFailedError where the message is a reason."""
    end = _HEADER_AT + int.from_bytes(message[1:_HEADER_AT], "little")
    header = json.loads(message[_HEADER_AT:end])
    if message[0] == Kind.FAILED:
        raise WorkerFailedError(header["reason"])
    return header, message[end:]


def _bytes_of(rows: torch.Tensor) -> Any:
    return rows.detach().contiguous().view(torch.uint8).numpy()


def _rows_of(content: bytes, dtype: torch.dtype, num_rows: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype).view(num_rows, -1)  # of a copy, which may be written


def layer_message(begins: bool, work: Dispatch, hidden: torch.Tensor) -> bytes:
    """A worker's part of a layer, which has rows. `begins`: it is the worker's first of a forward pass. `hidden` [T, H]
    of all tokens, in host memory and in the dtype of the experts; those go that its experts compute.
    """
    router = work.router
    header = {"begins": begins, "router": [getattr(router, name) for name in _ROUTER]}
    if work.rows is None:
        return message(Kind.LAYER, header, _bytes_of(hidden))
    rows = [work.rows[expert] for expert in router.experts]
    tokens, places = np.unique(torch.cat(rows).numpy() // work.top_k, return_inverse=True)
    if len(tokens) < len(hidden):
        hidden = hidden[torch.from_numpy(tokens)]
    header |= {"num_tokens": len(tokens), "num_rows": [len(of_expert) for of_expert in rows]}
    return message(Kind.LAYER, header, places.astype(np.int32), _bytes_of(hidden))


def layer_in(message: bytes, dtype: torch.dtype) -> tuple[bool, Dispatch, torch.Tensor]:
    """`begins`, `work` and `hidden` of a layer's message, whose tokens are numbered anew."""
    header, content = parts_of(message)
    router = RouterRan(*header["router"])
    experts = router.experts
    if "num_rows" not in header:
        work = Dispatch(router, len(experts), len(experts), True, None, {expert: i for i, expert in enumerate(experts)})
        return header["begins"], work, _rows_of(content, dtype, 1)
    lengths = header["num_rows"]
    ends = list(accumulate(lengths))
    tokens = np.frombuffer(content, np.int32, ends[-1])
    rows = dict(zip(experts, torch.from_numpy(tokens.astype(np.int64)).split(lengths), strict=True))
    places = {expert: slice(end - num, end) for expert, num, end in zip(experts, lengths, ends, strict=True)}
    work = Dispatch(router, 1, ends[-1], True, rows, None, places)  # of one choice a token: a row is its token
    return header["begins"], work, _rows_of(content[tokens.nbytes :], dtype, header["num_tokens"])


class LayerRan(NamedTuple):
    """A worker's part of a layer that ran."""

    outputs: torch.Tensor  # [n, H]
    waited_ns: int  # for transfers
    took_ns: int


def ran_message(ran: LayerRan) -> bytes:
    return message(Kind.DONE, {"waited_ns": ran.waited_ns, "took_ns": ran.took_ns}, _bytes_of(ran.outputs))


def ran_in(answer: bytes, dtype: torch.dtype, num_rows: int) -> LayerRan:
    header, content = parts_of(answer)
    return LayerRan(_rows_of(content, dtype, num_rows), **header)
