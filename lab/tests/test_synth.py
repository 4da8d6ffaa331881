"""Made-up routing has the statistics it claims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from expertly.core.errors import TraceError
from expertly_lab.synth import SynthWorkload, write_workload, zipf
from expertly_lab.trace.reader import Trace

Experts = npt.NDArray[np.uint16]


def experts_of(workload: SynthWorkload) -> Experts:
    return np.concatenate(list(workload.blocks()))


@pytest.mark.parametrize("keep", [0.0, 0.6])
def test_no_expert_twice_and_the_same_for_the_same_seed(keep: float) -> None:
    def experts(seed: int) -> Experts:
        return experts_of(zipf(3, 8, 3, 500, exponent=1.2, keep=keep, seed=seed))

    result = experts(1)
    assert result.shape == (500, 3, 3) and result.max() == 7
    assert (np.diff(np.sort(result, axis=-1).astype(int), axis=-1) > 0).all()
    np.testing.assert_array_equal(result, experts(1))
    assert (result != experts(2)).any()


def test_popularity_follows_the_exponent() -> None:
    first = experts_of(zipf(2, 6, 1, 40_000, exponent=1.5, seed=0))
    shares = np.sort(np.bincount(first[:, 0, 0], minlength=6))[::-1] / 40_000
    weights = np.arange(1, 7) ** -1.5
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.01)
    even = np.bincount(experts_of(zipf(1, 6, 2, 30_000, exponent=0)).reshape(-1)) / 30_000
    np.testing.assert_allclose(even, 1 / 3, atol=0.015)


def test_experts_are_kept_as_often_as_asked() -> None:
    def kept(keep: float) -> float:
        experts = experts_of(zipf(1, 64, 4, 5_000, exponent=0, keep=keep))[:, 0]
        return float((experts[1:, :, None] == experts[:-1, None, :]).any(-1).mean())

    assert kept(1.0) == 1.0
    by_chance = kept(0.0)
    assert by_chance == pytest.approx(4 / 64, abs=0.01)
    expected = 0.7 + 0.3 * 4 * 0.3 / (64 - 2.8)  # the drawn ones may be dropped ones
    assert kept(0.7) == pytest.approx(expected, abs=0.01)


def test_a_workload_becomes_a_trace(tmp_path: Path) -> None:
    workload = zipf(2, 8, 2, 11, seed=5)
    write_workload(tmp_path / "trace", workload, model="synth", num_requests=3, prefill_tokens=2, seed=5)
    trace = Trace.open(tmp_path / "trace")
    np.testing.assert_array_equal(trace.rows("experts", 0, 11), experts_of(workload))
    assert trace.rows("request", 0, 11).tolist() == [0] * 4 + [1] * 4 + [2] * 3
    assert trace.rows("iteration", 0, 11).tolist() == [0, 0, 1, 2, 3, 3, 4, 5, 6, 6, 7]
    assert trace.rows("is_prefill", 0, 11).tolist() == [True, True, False, False] * 2 + [True, True, False]
    weights = trace.rows("weights", 0, 11).astype(float)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=2e-3)
    assert (np.diff(weights, axis=-1) <= 0).all()
    assert not any(field.is_real for field in trace.manifest.fields.values())


def test_a_prefill_of_more_rows_than_a_block(tmp_path: Path) -> None:
    workload = zipf(1, 2, 1, 20_001)
    write_workload(tmp_path / "trace", workload, model="synth", prefill_tokens=20_000)
    trace = Trace.open(tmp_path / "trace")
    assert (trace.num_rows, trace.num_iterations) == (20_001, 2)


@pytest.mark.parametrize(
    ("sizes", "how", "message"),
    [
        ((1, 8, 9, 5), {}, "top_k=9: must be from 1 to 8"),
        ((1, 70_000, 2, 5), {}, "experts=70000: must be from 1 to 65535"),
        ((1, 4, 2, 5), {"num_requests": 6}, "requests=6: must be from 1 to the 5 tokens"),
        ((1, 4, 2, 5), {"num_requests": 2, "prefill_tokens": 3}, "prefill_tokens=3: must be from 0 to the 2 tokens of"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, sizes: tuple[int, ...], how: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        write_workload(tmp_path / "trace", zipf(*sizes), model="synth", **how)
    assert not (tmp_path / "trace").exists()
