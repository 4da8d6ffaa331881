"""A modelled lookahead is right as often as it says, wrong about nobody in particular, and labelled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from expertly.core.errors import TraceError
from expertly.lab.synth import modelled_lookahead, write_workload, zipf
from expertly.trace.reader import Trace
from expertly.trace.schema import TraceLayer

Bools = npt.NDArray[np.bool_]


def is_named(scores: npt.NDArray[np.float16], top_k: int) -> Bools:
    """[T, L - 1, E]: which are among the K best of the layers after the first."""
    order = np.argsort(-scores[:, :-1, 0].astype(np.float32), axis=-1, kind="stable")
    named = np.zeros(order.shape, np.bool_)
    np.put_along_axis(named, order[..., :top_k], True, axis=-1)
    return named


def is_needed(experts: npt.NDArray[np.uint16], num_experts: int) -> Bools:
    needed = np.zeros((*experts.shape[:2], num_experts), np.bool_)
    np.put_along_axis(needed, experts.astype(np.intp), True, axis=-1)
    return needed[:, 1:]


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (60, 4), (6, 3)])
@pytest.mark.parametrize("accuracy", [0.0, 0.545, 0.905, 1.0])
def test_it_is_right_as_often_as_stated(num_experts: int, top_k: int, accuracy: float) -> None:
    experts = np.concatenate(list(zipf(5, num_experts, top_k, 3000, exponent=0.3, seed=2).blocks()))
    scores = modelled_lookahead(np.random.default_rng(1), experts, num_experts, accuracy)
    assert scores.shape == (3000, 5, 1, num_experts) and scores.dtype == np.float16
    named, needed = is_named(scores, top_k), is_needed(experts, num_experts)
    right = (named & needed).sum() / needed.sum()
    assert right == pytest.approx(accuracy, abs=0 if accuracy in (0, 1) else 0.01)
    np.testing.assert_allclose(scores[:, :-1].astype(float).sum(-1), 1, atol=0.01)
    assert (scores[:, :-1] > 0).all() and not scores[:, -1].any()


def test_wrong_ones_are_anybody_and_missed_ones_anywhere() -> None:
    num_experts, top_k = 8, 2
    experts = np.concatenate(list(zipf(2, num_experts, top_k, 40_000, exponent=0, seed=3).blocks()))
    scores = modelled_lookahead(np.random.default_rng(1), experts, num_experts, 0.5)
    named, needed = is_named(scores, top_k), is_needed(experts, num_experts)
    wrong = (named & ~needed)[:, 0].sum(axis=0)
    np.testing.assert_allclose(wrong / wrong.sum(), 1 / num_experts, atol=0.005)
    places = np.argsort(np.argsort(-scores[:, 0, 0].astype(np.float32), axis=-1), axis=-1)
    of_missed = np.bincount(places[needed[:, 0] & ~named[:, 0]], minlength=num_experts)
    assert not of_missed[:top_k].any()
    np.testing.assert_allclose(of_missed[top_k:] / of_missed.sum(), 1 / (num_experts - top_k), atol=0.01)


def test_a_trace_with_it_says_so_and_is_the_same_otherwise(tmp_path: Path) -> None:
    workload = zipf(3, 8, 2, 50, seed=5)
    for name, accuracy in (("with", 0.905), ("again", 0.905), ("without", None)):
        write_workload(tmp_path / name, workload, model="synth", prefill_tokens=4, lookahead=accuracy, seed=5)
    traces = {name: Trace.open(tmp_path / name) for name in ("with", "again", "without")}
    trace = traces["with"]
    assert trace.is_modelled("lookahead") and not trace.is_real("lookahead")
    assert trace.manifest.fields["lookahead"].note.startswith("modelled: 0.905 of the K best")
    assert not traces["without"].is_modelled("lookahead") and not trace.is_modelled("experts")
    for field in ("experts", "weights"):
        np.testing.assert_array_equal(trace.rows(field, 0, 50), traces["without"].rows(field, 0, 50))
    scores = trace.rows("lookahead", 0, 50)
    np.testing.assert_array_equal(scores, traces["again"].rows("lookahead", 0, 50))
    assert scores.shape == (50, 3, 1, 8)


@pytest.mark.parametrize(
    ("layer", "accuracy", "message"),
    [
        (TraceLayer(8, 2), 1.5, "lookahead=1.5: must be from 0 to 1"),
        (TraceLayer(8, 2), float("nan"), "lookahead=nan: must be from 0 to 1"),
        (TraceLayer(7, 4), 0.9, "lookahead=0.9: of 7 experts, top-4, too few are not needed"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, layer: TraceLayer, accuracy: float, message: str) -> None:
    workload = zipf(2, layer.num_experts, layer.top_k, 5)
    with pytest.raises(TraceError, match=message):
        write_workload(tmp_path / "trace", workload, model="synth", lookahead=accuracy)
    assert not (tmp_path / "trace").exists()


def test_who_names_as_many_as_he_can_may_be_always_right(tmp_path: Path) -> None:
    write_workload(tmp_path / "trace", zipf(2, 4, 4, 5), model="synth", lookahead=1.0)
    assert (Trace.open(tmp_path / "trace").rows("lookahead", 0, 5)[:, 0] > 0).all()
