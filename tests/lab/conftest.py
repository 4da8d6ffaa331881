"""Recording and profiles run on the tiny models of the engine's tests."""

from tests.engine.conftest import cases

__all__ = ["cases"]
