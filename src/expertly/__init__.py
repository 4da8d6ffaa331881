"""Run Mixture-of-Experts language models whose experts do not fit in memory, without changing one output token.

`load`, `stats` and `unload` come from `expertly.api` when they are first asked for: `import expertly` alone
imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

# How long torch's threads spin before they sleep, read when torch is imported: a millisecond in place of many, in which
# they take a processor from the kernels' own threads and from whoever else is on the machine (docs/log/).
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from expertly.api import load, stats, unload

__version__ = "0.1.0"

__all__ = ["__version__", "load", "stats", "unload"]


def __getattr__(name: str) -> Any:
    if name in ("load", "stats", "unload"):
        from expertly import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
