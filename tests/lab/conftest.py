"""Recording and profiles run on the tiny models of the engine's tests."""

from tests.engine.conftest import cases, keep_the_code_of_libraries, one_thread

__all__ = ["cases", "keep_the_code_of_libraries", "one_thread"]
