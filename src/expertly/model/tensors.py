"""Bytes of a checkpoint as torch tensors, and casts that do not lose what matters."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from expertly.core.errors import CheckpointError, ConfigError
from expertly.store.checkpoint import Bytes, Checkpoint, TensorRef

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}


def torch_dtype(name: str, ref: TensorRef) -> torch.dtype:
    """The dtype of a checkpoint's tensor. Raises CheckpointError where torch has none."""
    dtype = getattr(torch, _DTYPES.get(ref.dtype, ""), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{ref.path}: tensor {name!r}: dtype={ref.dtype!r}: cannot be read by this torch")
    return dtype


def read_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    ref = checkpoint.tensors[name]
    return _tensor(checkpoint.read(name), torch_dtype(name, ref), ref.shape)


def read_tensor_row(checkpoint: Checkpoint, name: str, index: int) -> torch.Tensor:
    """`tensor[index : index + 1]`."""
    ref = checkpoint.tensors[name]
    return _tensor(checkpoint.read_row(name, index), torch_dtype(name, ref), (1, *ref.shape[1:]))


def _tensor(raw: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not raw.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def cast(tensor: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """`tensor` in `dtype`. Raises ConfigError where a finite value becomes infinite (float16 ends at 65504)."""
    if tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if torch.finfo(dtype).max < _largest(tensor.dtype) and bool((result.isinf() & ~tensor.isinf()).any()):
        finite = tensor.float().nan_to_num(0.0, 0.0, 0.0)
        raise ConfigError(
            f"dtype={str(dtype).removeprefix('torch.')!r}: {what} holds {finite.abs().max().item():g}, which is beyond "
            f"its {torch.finfo(dtype).max:g}; accepted for this model: bfloat16, float32"
        )
    return result


def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max if dtype.is_floating_point else float(torch.iinfo(dtype).max)


def to_bytes(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous tensor."""
    flat: Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


_FLOAT16_MAX = 65504.0


def saturated_half(values: torch.Tensor) -> npt.NDArray[np.float16]:
    """A copy in float16 in which nothing finite has become infinite."""
    half: npt.NDArray[np.float16] = values.float().clamp(-_FLOAT16_MAX, _FLOAT16_MAX).half().cpu().numpy()
    return half
