"""How a layer runs, in the engine: the tokens of the unmodified model, and the transfers that the way says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.core.messages import Span
from expertly.scheduler.decisions import replay_file
from tests.engine.conftest import Cases
from tests.engine.observe import loaded
from tests.engine.test_prediction import assert_prefetched, of_phases, prediction
from tests.families import generate, logits_of
from tests.scheduler.drive import WAYS

pytestmark = pytest.mark.timeout(120)


def demanded_together(model: Any) -> list[int]:
    """From now on: how many experts are demanded and not here, whenever some are demanded."""
    backend = handle(model).engine.device
    submit, poll, wait = backend.submit, backend.poll, backend.wait
    coming: dict[Span, None] = {}
    found: list[int] = []

    def note(spans: Iterable[Span]) -> None:
        asked = list(spans)
        coming.update(dict.fromkeys(asked))
        found.append(len({(span.layer, span.expert) for span in coming}))
        submit(asked)

    def arrived(span: Span | None) -> Any:
        coming.pop(span, None)  # type: ignore[arg-type]
        return span

    backend.submit = note  # type: ignore[method-assign]
    backend.poll = lambda: arrived(poll())  # type: ignore[method-assign]
    backend.wait = lambda: arrived(wait())  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(("transfer", "segments"), [("asynchronous", 4), ("synchronous", 1)])
@pytest.mark.parametrize(("order", "preemption"), WAYS)
def test_however_a_layer_runs_it_is_lossless(
    order: str, preemption: str, transfer: str, segments: int, cases: Cases, tmp_path: Path
) -> None:
    case, path = cases["qwen3_moe"], tmp_path / "decisions.jsonl"
    system = f"lru:prediction=lookahead:transfer={transfer}:preemption={preemption}:order={order}"
    with loaded(case.store, system=system, segments=segments, memory="40%", decisions=path) as model:
        found = demanded_together(model)
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens
        torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)
        assert_prefetched(model)
        assert prediction(model)["matcher"] == ("inline" if transfer == "synchronous" else "thread")
        assert (max(found) == 1) == (preemption == "late"), "found late, they are demanded one by one"
        needed, in_time = of_phases(model, "prefetched_needed"), of_phases(model, "prefetched_in_time")
        if transfer == "synchronous":
            assert in_time == needed > 0, "no demand finds what it needs under way"
            assert not handle(model).engine.scheduler.queue.num_in_flight
            assert expertly.stats(model).as_dict()["stall_s"] > 0
    header, replayed = replay_file(path)
    assert header["order"] == order and replayed.difference is None and replayed.num_layers > 0
