"""Dtype names: those of safetensors headers, and the three that a packed store may have."""

from __future__ import annotations

from expertly.core.errors import ConfigError

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element, by the name that a safetensors header uses."""

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
