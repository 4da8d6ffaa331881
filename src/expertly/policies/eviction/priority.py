"""The cache priority of MoEpic (section 3.3, equation 4): what LCP evicts by and its configurator ranks by."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError


class CachePriority:
    """mu * rho ** (nu / omega): mu tokens served, nu tokens since the last use.

    All priorities of a cache decay at the same rate between uses, so their order only changes at a use: what this gives
    orders as they do and stays as it is until the next use. It is last_use + omega * log(mu) / log(1 / rho), in tokens,
    which never underflows. The powers of two in mu are added apart: the priorities the formula makes equal (twice the
    tokens, `halving` tokens earlier) stay equal.

    Raises ConfigError where `rho` is not between 0 and 1, or `omega` not above 0 tokens.
    """

    __slots__ = ("_halving",)

    def __init__(self, rho: float = 0.25, omega: float = 128.0) -> None:
        if not 0 < rho < 1:
            raise ConfigError(f"rho={rho}: must be above 0 and below 1")
        if not 0 < omega < math.inf:
            raise ConfigError(f"omega={omega}: must be above 0 tokens")
        self._halving = omega / -math.log2(rho)  # tokens in which a priority halves

    def __call__(self, count: int, last_use: int) -> float:
        """Of an expert that served `count` tokens, at least 1, the last of them token number `last_use`."""
        mantissa, exponent = math.frexp(count)
        return (last_use + exponent * self._halving) + math.log2(mantissa) * self._halving

    def of_many(self, counts: npt.NDArray[np.intp], last_uses: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        """The same of many, to the last bit: NumPy's logarithm may differ there."""
        mantissas, exponents = np.frexp(counts)
        logs = np.array([math.log2(mantissa) for mantissa in mantissas.tolist()])
        priorities: npt.NDArray[np.float64] = (last_uses + exponents * self._halving) + logs * self._halving
        return priorities
