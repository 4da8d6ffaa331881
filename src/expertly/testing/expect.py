"""An assertion that `python -O` does not leave out."""

from __future__ import annotations


def expect(is_so: bool, promise: str, found: object = None) -> None:
    """Raise AssertionError with the promise that is not kept, and what was found instead."""
    if not is_so:
        raise AssertionError(promise if found is None else f"{promise}; found {found!r:.200}")
