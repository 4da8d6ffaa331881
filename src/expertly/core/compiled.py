"""Opens the compiled code, which installing builds: `native/products.c`, `native/readers.c`, `policies/reuse.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from expertly.core.errors import ConfigError

PACKAGE = Path(__file__).parents[1]


def compiled(
    name: str, version: int, functions: Mapping[str, tuple[Any, Sequence[Any]]], kind: type[ctypes.CDLL] = ctypes.CDLL
) -> SimpleNamespace:
    """The functions of a library, `name` "native/_readers", say: their names without "expertly_", and of each what it
    returns and its arguments. Raises ConfigError where the library is not there, or of another version than `version`.
    """
    problem = "was not built"
    for path in sorted(PACKAGE.glob(f"{name}*.so")):
        try:
            library = kind(str(path))
            number = getattr(library, f"expertly{path.name.partition('.')[0]}_version")()
            if number == version:
                made = {each: getattr(library, f"expertly_{each}") for each in functions}
                for each, (result, arguments) in functions.items():
                    made[each].restype, made[each].argtypes = result, arguments
                return SimpleNamespace(**made)
            problem = f"is of version {number}, needed is {version}"
        except (OSError, AttributeError) as error:
            problem = f"cannot be used ({error})"
    raise ConfigError(
        f"expertly's compiled code {name} {problem}: install expertly again (in a checkout: make setup, or "
        "pip install -e .)"
    )
