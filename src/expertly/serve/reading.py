"""Turns a request's body, which may be hostile, into a checked model. Everything wrong with it is an ApiError."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from expertly.serve.errors import ApiError, invalid

Checked = TypeVar("Checked", bound=BaseModel)


async def read(request: Request, model: type[Checked], limit: int) -> Checked:
    """The body, of at most `limit` bytes, as `model`. Raises ApiError 413 above it, 415 where it says that it is no
    JSON, and what `check` raises.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "Content-Type: accepted: application/json", code="unsupported_media_type")
    told = request.headers.get("content-length", "")
    if told.isascii() and told.isdecimal() and len(told) < 19 and int(told) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise _too_large(limit)
    try:
        value = from_json(bytes(body), allow_inf_nan=False)  # nests 200 levels at most
    except ValueError as error:
        raise invalid(f"the body must be JSON: {error}") from None
    return check(model, value)


def check(model: type[Checked], value: object) -> Checked:
    """`value` as a `model`. Raises ApiError naming the first wrong field and what it accepts."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _from_pydantic(error) from None


def _from_pydantic(error: ValidationError) -> ApiError:
    every = error.errors(include_url=False, include_context=False, include_input=False)
    outer, of_list = every[0]["loc"][:-1], ("function-", "tagged-", "list[", "constrained-")
    first = every[0]
    if first["loc"][-1:] == ("str",):  # of what may be a text or a list: the list's errors go deeper where it is one
        first = max((one for one in every if one["loc"][: len(outer)] == outer), key=lambda one: len(one["loc"]))
    path = [str(part) for part in first["loc"] if part != "str" and not str(part).startswith(of_list)]
    message = first["msg"]
    if first["type"] == "value_error":  # one of ours, which begins with the field
        name, _, message = message.removeprefix("Value error, ").partition(": ")
        path.append(name)
    elif first["type"] == "model_type":  # its message names our class
        message = "must be an object"
    param = ".".join(path)[:200] or None
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return invalid(f"{param or 'the body'}: {message}", param, code)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is too large; accepted: {limit} bytes", code="body_too_large")
