"""The dtypes that a packed store may have."""

from __future__ import annotations

from expertly.core.errors import ConfigError
from expertly.core.headers import BITS

STORE_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""What experts may be stored as: torch's name to safetensors' name."""

ITEMSIZE = {name: BITS[code] // 8 for name, code in STORE_DTYPES.items()}

IS_FLOAT = frozenset({"F16", "BF16", "F32", "F64"})
"""Those that loading casts to the model's dtype."""


def check_store_dtype(name: object, field: str = "dtype") -> str:
    """`name` where it is one that experts may be stored as. Raises ConfigError naming what is accepted."""
    if not isinstance(name, str) or name not in STORE_DTYPES:
        raise ConfigError(f"{field}={name!r}: not a dtype that experts can have; accepted: {', '.join(STORE_DTYPES)}")
    return name
