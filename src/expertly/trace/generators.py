"""Fields that are not stored but made when they are read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TOKEN_VECTOR_SIZE = 64


def token_vectors(tokens: npt.NDArray[np.int32], size: int) -> npt.NDArray[np.float16]:
    """A fixed vector [T, size] of unit length for each token id, random in direction.

    The same id gives the same vector on every machine and in every version: the bits come from the splitmix64
    finaliser over (id, place), two of them make a normal number (Box-Muller), and the vector is then normalised.
    """
    distinct, places = np.unique(tokens, return_inverse=True)
    counter = distinct.astype(np.int64).astype(np.uint64)[:, None] * np.uint64(2 * size)
    counter = counter + np.arange(2 * size, dtype=np.uint64)
    uniform = ((_mixed(counter) >> np.uint64(11)).astype(np.float64) + 1) / 2.0**53  # in (0, 1]
    normal = np.sqrt(-2 * np.log(uniform[:, :size])) * np.cos(2 * np.pi * uniform[:, size:])
    vectors = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    found: npt.NDArray[np.float16] = vectors.astype(np.float16)[places.reshape(-1)]
    return found


def _mixed(counter: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        bits = counter * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: npt.NDArray[np.uint64] = bits ^ (bits >> np.uint64(31))
    return mixed
