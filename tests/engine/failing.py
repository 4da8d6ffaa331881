"""What raises where something is patched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def raising(error: BaseException) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises
