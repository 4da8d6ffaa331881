"""Entropies equal those worked out by hand, however rows are cut into blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from expertly_lab.trace.schema import NO_EXPERT
from expertly_lab.trace_analysis import EntropyMeter, entropy


def metered(experts: Any, weights: Any, requests: list[int], probs: Any = None, block: int = 99) -> EntropyMeter:
    """Of one layer of four experts, [T, K]; rows come in blocks."""
    meter = EntropyMeter(1, 4, np.bincount(requests).tolist())
    columns = [
        np.array(requests),
        *(None if one is None else np.array(one)[:, None] for one in (experts, weights, probs)),
    ]
    for first in range(0, len(requests), block):
        meter.add(*(None if one is None else one[first : first + block] for one in columns))  # type: ignore[arg-type]
    return meter


def bits(meter: EntropyMeter) -> tuple[float, float, dict[int, float]]:
    """(a token's, a request's, of the first 1, 2, 4, ... tokens)"""
    growth = {num: float(sums[0] / meter.growth_requests[num][0]) for num, sums in meter.growth_bits.items()}
    return meter.token_bits[0] / meter.num_tokens[0], meter.request_bits[0] / meter.num_requests[0], growth


def test_entropy_in_bits() -> None:
    found = entropy(np.array([[0.25] * 4, [1, 0, 0, 0], [2, 2, 0, 0], [0, 0, 0, 0], [0.5, 0.25, 0.125, 0.125]]))
    assert found.tolist() == [2, 0, 1, 0, 1.75]


def test_a_token_is_certain_while_its_request_is_not() -> None:
    """Four tokens that choose one expert each: nothing to guess at a token, everything over the request."""
    assert bits(metered([[0], [1], [2], [3]], [[0.5]] * 4, [0] * 4)) == (0, 2, {1: 0, 2: 1, 4: 2})


@pytest.mark.parametrize("block", [1, 2, 99])
def test_weights_are_normalised_and_requests_averaged(block: int) -> None:
    meter = metered([[0, 1], [0, 1], [2, 3]], [[3, 3], [0.2, 0.2], [1, 0]], [0, 1, 0], block=block)
    token, request, growth = bits(meter)
    first = 1.5  # 0.5, 0.5 and 1: a quarter, a quarter, a half
    assert token == pytest.approx((1 + 1 + 0) / 3, abs=1e-6) and request == pytest.approx((first + 1) / 2, abs=1e-6)
    assert growth == pytest.approx({1: 1, 2: first}, abs=1e-6)


def test_with_probabilities_all_experts_count() -> None:
    token, request, _ = bits(metered([[0], [0]], [[1], [1]], [0, 0], [[0.25] * 4, [1, 0, 0, 0]]))
    assert token == 1 and request == pytest.approx(entropy(np.array([1.25, 0.25, 0.25, 0.25])))


def test_a_layer_that_never_ran_counts_as_no_token() -> None:
    meter = metered([[NO_EXPERT]] * 4, [[0]] * 4, [0] * 4)
    assert (meter.num_tokens[0], meter.num_requests[0]) == (0, 0)
