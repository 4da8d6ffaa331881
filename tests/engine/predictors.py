"""Predictors for tests, put in the place of a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Began, Routed, Want
from expertly.policies.prediction import Predictor
from expertly.policies.registry import PREDICTORS

SYSTEM = "lru:prediction=put:distance=2"
"""What runs a predictor that was `put`."""


class Diary(Predictor):
    """Keeps all that it is shown; predicts nothing."""

    def __init__(self, *wants: Want) -> None:
        super().__init__()
        self.wants = frozenset(wants or ("embedding", "experts", "scores", "lookahead"))
        self.began: list[Began] = []
        self.routed: list[list[Routed]] = []
        self.ends: list[bool] = []

    def begin_iteration(self, began: Began) -> Iterable[Prediction]:
        self.began.append(began)
        self.routed.append([])
        return ()

    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        self.routed[-1].append(routed)
        return ()

    def end_iteration(self, ok: bool) -> None:
        self.ends.append(ok)


class Everything(Predictor):
    """Says of every layer that it needs everything, all the time: more than any pool holds."""

    def __init__(self, geometry: Geometry, **kwargs: Any) -> None:
        super().__init__()
        self._geometry = geometry

    def begin_iteration(self, began: Began) -> Iterable[Prediction]:
        return self._from(-1)

    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        return self._from(routed.layer)

    def _from(self, now: int) -> Iterable[Prediction]:
        for layer in range(now + 1, self._geometry.num_layers):
            num_experts = self._geometry.layers[layer].num_experts
            share = [1.0 / num_experts] * num_experts
            yield Prediction(layer, list(range(num_experts)), share, layer - now, share)


def put(monkeypatch: pytest.MonkeyPatch, make: Callable[[Geometry], Predictor]) -> str:
    """The system whose predictor `make` makes."""

    class Put(Everything):
        @classmethod
        def make(cls, geometry: Geometry, *values: Any) -> Predictor:
            return make(geometry)

    monkeypatch.setitem(PREDICTORS.built_in, "put", Put)
    return SYSTEM


class Failing(Everything):
    """The same, until it fails."""

    def __init__(self, geometry: Geometry, after: int) -> None:
        super().__init__(geometry)
        self._left = after

    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        self._left -= 1
        if self._left < 0:
            raise ValueError("the predictor gave up")
        return super().router_ran(routed)
