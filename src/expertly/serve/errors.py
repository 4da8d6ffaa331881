"""Errors as clients get them: OpenAI's error object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

MAX_MESSAGE = 500  # characters of a message: it may quote what a client sent


class ApiError(Exception):
    """Ends a request with a status and an error object. `param` is the field it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.message = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "..."
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that can never work as it is."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str) -> ApiError:
    """The server cannot serve now; the request is not the reason."""
    return ApiError(503, message, kind="server_error", code=code, headers={"Retry-After": "5"})


def busy(message: str, code: str, **headers: str) -> ApiError:
    """The server may serve the same request soon."""
    headers = {"Retry-After": "1", **headers}
    return ApiError(429, f"{message}; try again in 1 s", kind="rate_limit_error", code=code, headers=headers)


def failed(message: str) -> ApiError:
    """A request was accepted and then failed."""
    return ApiError(500, message, kind="server_error", code="step_failed")


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about fields of a chat request, by their names in another API."""
    try:
        yield
    except ApiError as error:
        for field, name in names.items():
            if error.param is not None and f"{error.param}.".startswith(f"{field}."):
                error.param, error.message = (text.replace(field, name, 1) for text in (error.param, error.message))
        raise
