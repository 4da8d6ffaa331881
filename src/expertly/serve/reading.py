"""Turns a request's body, which may be hostile, into a checked model. Everything wrong with it is an ApiError."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from expertly.engine.process import trim_heap
from expertly.serve.errors import ApiError, busy, invalid

READ_S = 30.0  # for a body to come
SMALL_NBYTES = 16 << 10  # a body of this size is read whatever others there are
LARGE_NBYTES = 256 << 10  # memory of a larger one is given back at once
MAX_BODIES = 512  # bodies at a time

MIN_VALUES = 1 << 16
"""JSON values that any body may have: 2 048 messages with tools have a quarter of it. A value takes up to 100 bytes."""

_CLOSE = {"Connection": "close"}  # the rest of the body is not read

Checked = TypeVar("Checked", bound=BaseModel)


class Bodies:
    """Reads bodies of at most `limit` bytes and `most_values` JSON values. Those that are not yet made tokens have
    at most twice `limit` bytes together, besides the first SMALL_NBYTES of each.
    """

    def __init__(self, limit: int, most_values: int) -> None:
        self._limit = limit
        self._most_values = most_values
        self._read_s = READ_S
        self._num_bodies = 0
        self._nbytes = 0  # of all bodies, without the first SMALL_NBYTES of each

    @asynccontextmanager
    async def read(self, request: Request, model: type[Checked]) -> AsyncIterator[Checked]:
        """The body as `model`; it counts until the block ends. Raises ApiError 413 above the limit, 415 where it says
        that it is no JSON, 408 where it takes too long, 429 where there is no room for it, and what `check` raises.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "Content-Type: accepted: application/json", code="unsupported_media_type")
        length = request.headers.get("content-length", "")
        if length.isascii() and length.isdecimal() and len(length) < 19 and int(length) > self._limit:
            raise self._too_large()
        if self._num_bodies >= MAX_BODIES:
            raise busy("too many large requests are being read", "no_room_for_body", **_CLOSE)
        body = bytearray()
        self._num_bodies += 1
        try:
            try:
                await asyncio.wait_for(self._receive(request, body), self._read_s)
            except asyncio.TimeoutError:
                sentence = f"the body did not come in {self._read_s:g} s"
                raise ApiError(408, sentence, code="body_too_slow", headers=_CLOSE) from None
            yield self._checked(body, model)
        finally:
            self._num_bodies -= 1
            self._nbytes -= max(0, len(body) - SMALL_NBYTES)
            if len(body) > LARGE_NBYTES:
                del body
                # what was made of it was in pieces too small to go back by themselves
                asyncio.get_running_loop().run_in_executor(None, trim_heap)

    async def _receive(self, request: Request, body: bytearray) -> None:
        async for part in request.stream():
            if len(body) + len(part) > self._limit:
                raise self._too_large()
            more = max(0, len(body) + len(part) - SMALL_NBYTES) - max(0, len(body) - SMALL_NBYTES)
            if more and self._nbytes + more > 2 * self._limit:
                raise busy("too many large requests are being read", "no_room_for_body", **_CLOSE)
            self._nbytes += more
            body += part

    def _checked(self, body: bytearray, model: type[Checked]) -> Checked:
        num_values = count_values(body, self._most_values)
        if num_values > self._most_values:
            raise invalid(f"the body: more than {self._most_values} JSON values; accepted: at most that many")
        try:
            value = from_json(body, allow_inf_nan=False)  # nests 200 levels at most
        except ValueError as error:
            raise invalid(f"the body must be JSON: {error}") from None
        return check(model, value)

    def _too_large(self) -> ApiError:
        sentence = f"the body is too large; accepted: {self._limit} bytes"
        return ApiError(413, sentence, code="body_too_large", headers=_CLOSE)


def count_values(body: bytes | bytearray, most: int) -> int:
    """The JSON values in a body, or more; `most` + 1 or more where its strings are. Takes 0.01 s for 4 MB."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is left of quotes begins and ends strings
    num_strings = body.count(b'"') // 2
    if num_strings > most:
        return num_strings
    outside = b"".join(body.split(b'"')[::2])
    return 1 + sum(outside.count(mark) for mark in (b"[", b"{", b",", b":"))


def check(model: type[Checked], value: object) -> Checked:
    """`value` as a `model`. Raises ApiError naming the first wrong field and what it accepts."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _from_pydantic(error) from None


def _from_pydantic(error: ValidationError) -> ApiError:
    every = error.errors(include_url=False, include_context=False)
    field = every[0]["loc"]
    field = field[: next((place for place, part in enumerate(field) if _is_type(part)), len(field))]
    of_field = [problem for problem in every if problem["loc"][: len(field)] == field]
    # of the types that a value may be of it is the one that it gets furthest with
    first = max(of_field, key=lambda each: (not _is_of_type(each), len(each["loc"]), str(each["loc"][-1:])))
    path = [str(part) for part in first["loc"] if not _is_type(part) and part != "[key]"]
    message, value = first["msg"], first["input"]
    if _is_of_type(first):
        alike = [each["msg"] for each in of_field if _is_of_type(each) and each["loc"][:-1] == first["loc"][:-1]]
        message = " or ".join(dict.fromkeys(alike)).replace(" or Input should be ", " or ")
    if first["type"] == "value_error":  # one of ours, which begins with the field
        name, _, message = message.removeprefix("Value error, ").partition(": ")
        path.append(name)
    elif first["type"] == "model_type":  # its message names our class
        message = "must be an object"
    if isinstance(value, bool | float | str | None) or (isinstance(value, int) and abs(value) < 1 << 64):
        message += f", not {json.dumps(value, ensure_ascii=False):.80}"
    param = ".".join(path)[:200] or None
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return invalid(f"{param or 'the body'}: {message}", param, code)


def _is_type(part: int | str) -> bool:
    """Whether a part of an error's place is no field, but a type that a value may be of."""
    types = ("function-", "tagged-", "list[", "constrained-", "literal[", "item-")
    return isinstance(part, str) and (part == "str" or part[:1].isupper() or part.startswith(types))


def _is_of_type(problem: Any) -> bool:
    """Whether an error says that a value is of another type."""
    is_choice = problem["type"] == "literal_error"
    return str(problem["type"]).endswith("_type") or (is_choice and not isinstance(problem["input"], str))
