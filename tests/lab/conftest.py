"""Recording and profiles run on the tiny models of the engine's tests."""

from tests.engine.conftest import cases, one_thread

__all__ = ["cases", "one_thread"]
