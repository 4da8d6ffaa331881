"""A request's body: hostile bytes until they are a checked model. Everything wrong with it is an ApiError."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from expertly.serve.errors import ApiError, invalid

MAX_DEPTH = 64
"""Levels that JSON may nest: what walks it recursively has room for more."""

Checked = TypeVar("Checked", bound=BaseModel)


def parse_json(body: bytes) -> Any:
    """The value that `body` says. Raises ApiError where it is no JSON, no UTF-8, or nests too deep."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise invalid("the body must be UTF-8") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # JSONDecodeError, and integers of too many digits
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number that cannot be read"
        raise invalid(f"the body must be JSON: {reason}") from None
    _check(value)
    return value


def check(model: type[Checked], value: Any) -> Checked:
    """`value` as `model`. Raises ApiError naming the first field that is wrong, and what is accepted."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _from_pydantic(error) from None


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _check(value: Any) -> None:
    """No recursion: what may be too deep is walked with a list."""
    todo: list[tuple[Any, int]] = [(value, 1)]
    while todo:
        one, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise _too_deep()
        if isinstance(one, str):
            _check_text(one)
        elif isinstance(one, list):
            todo += [(item, depth + 1) for item in one]
        elif isinstance(one, dict):
            for name, item in one.items():
                _check_text(name)
                todo.append((item, depth + 1))


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid("a string must be Unicode: it holds half of a surrogate pair") from None


def _too_deep() -> ApiError:
    return invalid(f"the body nests too deep; accepted: {MAX_DEPTH} levels")


def _from_pydantic(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = [str(part) for part in first["loc"] if not str(part).startswith(("function-", "tagged-"))]
    param = ".".join(path)[:200] or None
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return invalid(f"{param or 'the body'}: {first['msg']}", param, code)
