"""What a predictor is shown of a model is what a full recording of the same passes holds; rows have requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import expertly
from expertly.api import handle
from expertly.core.errors import ConfigError
from expertly.core.observation import IterationInfo
from expertly.engine.observe import RequestNumbers
from expertly.model.routers import find_routers
from expertly_lab.recording import record
from expertly_lab.trace.reader import Trace
from expertly_lab.trace.schema import NO_EXPERT
from tests.engine import predictors
from tests.engine.conftest import Cases
from tests.engine.observe import loaded, reader_threads
from tests.engine.predictors import Diary
from tests.families import generate, make_prompts


def batch(num_sequences: int, length: int, is_prefill: bool) -> IterationInfo:
    """A batch of sequences of one length."""
    return IterationInfo(
        np.full(num_sequences * length, is_prefill),
        None,
        num_sequences,
        "prefill" if is_prefill else "decode",
        sequences=np.repeat(np.arange(num_sequences, dtype=np.int32), length),
    )


def side_by_side(*parts: tuple[int, int], num_pads: int = 0, knows_positions: bool = True) -> IterationInfo:
    """Sequences side by side, (position of the first row, rows) each, then pads."""
    sequences = [i for i, (_, length) in enumerate(parts) for _ in range(length)]
    is_prefill = [length > 1 or not start for start, length in parts for _ in range(length)]
    num_rows = len(sequences) + num_pads
    return IterationInfo(
        np.array(is_prefill + [False] * num_pads),
        np.arange(num_rows) >= len(sequences) if num_pads else None,
        len(parts),
        "prefill" if any(is_prefill) else "decode",
        sequences=np.array(sequences + [len(parts) - 1] * num_pads, np.int32),
        starts=np.array([start for start, _ in parts]) if knows_positions else None,
    )


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        pytest.param(
            [batch(2, 3, True), batch(2, 1, False), batch(2, 1, False), batch(1, 4, True), batch(1, 1, False)],
            [[0, 0, 0, 1, 1, 1], [0, 1], [0, 1], [2, 2, 2, 2], [2]],
            id="a number until the next prefill",
        ),
        pytest.param(
            [batch(1, 5, True), batch(1, 4, False), batch(1, 1, False)],
            [[0] * 5, [0] * 4, [0]],
            id="several tokens decoded at once",
        ),
        pytest.param(
            [batch(2, 1, True), batch(6, 1, False), batch(6, 1, False)],
            [[0, 1], [*range(2, 8)], [*range(2, 8)]],
            id="a batch of another size is new",
        ),
        pytest.param([batch(1, 1, False)] * 2, [[0], [0]], id="decoding that nobody began"),
        pytest.param(
            [
                side_by_side((0, 3), (0, 2)),
                side_by_side((3, 1), (2, 1), (0, 2)),
                side_by_side((3, 1), (2, 1), num_pads=2),  # the first has ended
                side_by_side((4, 1), (3, 1), (0, 1)),
            ],
            [[0, 0, 0, 1, 1], [0, 1, 2, 2], [1, 2, 2, 2], [1, 2, 3]],
            id="side by side, known by positions",
        ),
        pytest.param(
            [side_by_side((0, 4)), side_by_side((4, 4), (0, 1)), side_by_side((8, 2), (1, 1))],
            [[0] * 4, [0] * 4 + [1], [0, 0, 1]],
            id="parts of a prompt",
        ),
        pytest.param(
            [side_by_side((0, 2), (0, 2)), side_by_side((2, 1), (2, 1))],
            [[0, 0, 1, 1], [0, 1]],
            id="equal positions go on in order",
        ),
        pytest.param(
            [side_by_side((0, 2), (0, 0), (0, 1)), side_by_side((2, 1), (1, 1))],
            [[0, 0, 1], [0, 1]],
            id="sequences without rows have no number",
        ),
        pytest.param(
            [side_by_side((0, 2), (0, 1), knows_positions=False), side_by_side((2, 1), (1, 1), knows_positions=False)],
            [[0, 0, 1], [0, 1]],
            id="without positions, a batch",
        ),
    ],
)
def test_rows_have_the_numbers_of_their_requests(passes: list[IterationInfo], expected: list[list[int]]) -> None:
    numbers = RequestNumbers()
    assert [numbers.of_rows(each).tolist() for each in passes] == expected


def told(model: Any) -> Diary:
    """What the predictor of a model was told."""
    prefetching = handle(model).engine.prefetching
    assert prefetching is not None and isinstance(prefetching.predictor, Diary)
    assert prefetching.error is None
    return prefetching.predictor


def columns(diary: Diary, num_layers: int, name: str, width: int) -> np.ndarray[Any, Any]:
    """[rows, L, ...] of what the routers said, with zeros (or no expert) where a layer did not run."""
    passes = []
    for began, routed in zip(diary.began, diary.routed, strict=True):
        shape = (len(began.requests), num_layers, width)
        field = np.full(shape, NO_EXPERT) if name == "experts" else np.zeros(shape, np.float32)
        for each in routed:
            values = getattr(each, name).reshape(shape[0], -1)
            field[:, each.layer, : values.shape[-1]] = values
        passes.append(field)
    return np.concatenate(passes)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "ernie4_5_moe", "jamba"])
def test_it_is_what_a_full_recording_holds(
    family: str, cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases[family]
    system = predictors.put(monkeypatch, lambda geometry: Diary())
    with loaded(case.store, system=system, memory="50%") as model:
        with record(model, tmp_path / "trace", full=True) as recording:  # both watch the same routers
            recording.begin_batch([recording.begin_request(), recording.begin_request()])
            result = generate(model, case.prompts, 4)
            assert result == [tokens[: len(result[0])] for tokens in case.tokens]
        diary = told(model)
    trace = Trace.open(tmp_path / "trace")
    assert trace.num_iterations == len(diary.began) and diary.ends == [True] * trace.num_iterations

    def recorded(name: str) -> Any:
        return trace.rows(name, 0, trace.num_rows)

    experts, num_layers = recorded("experts"), len(trace.manifest.layers)
    num_experts = max(layer.num_experts for layer in trace.manifest.layers)
    chosen = columns(diary, num_layers, "experts", experts.shape[2])
    np.testing.assert_array_equal(np.where(chosen < num_experts, chosen, NO_EXPERT), experts)
    np.testing.assert_array_equal(np.concatenate([each.is_prefill for each in diary.began]), recorded("is_prefill"))
    embedding = np.concatenate([each.embedding for each in diary.began if each.embedding is not None])
    np.testing.assert_array_equal(embedding, recorded("embedding").astype(np.float32))
    scores = columns(diary, num_layers, "scores", num_experts)
    np.testing.assert_array_equal(scores, recorded("probs").astype(np.float32))
    lookahead = recorded("lookahead")[:, :, : min(2, num_layers - 1)].astype(np.float32)
    lookahead = lookahead.reshape(trace.num_rows, num_layers, -1)
    seen = columns(diary, num_layers, "lookahead", lookahead.shape[2])
    np.testing.assert_array_equal(seen, lookahead)
    assert seen[:, 0].any()
    assert all([each.layer for each in routed] == [*range(num_layers)] for routed in diary.routed)
    requests = np.concatenate([each.requests for each in diary.began])
    np.testing.assert_array_equal(requests, recorded("request"))


def test_pads_are_left_out(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of a long and a short prompt shows the rows that each shows alone."""
    case = cases["gpt_oss"]
    prompts = [case.prompts[0], make_prompts(1, length=5, seed=8)[0]]

    def shown(batches: list[list[list[int]]]) -> list[Diary]:
        diaries: list[Diary] = []
        for batch in batches:
            system = predictors.put(monkeypatch, lambda geometry: Diary("embedding", "experts", "scores"))
            with loaded(case.store, system=system) as model:
                generate(model, batch, 3)
                diaries.append(told(model))
        return diaries

    (both,) = shown([prompts])
    alone = shown([[prompt] for prompt in prompts])
    for step, began in enumerate(both.began):
        parts = [each.began[step] for each in alone]
        assert began.embedding is not None
        np.testing.assert_array_equal(began.embedding, np.concatenate([part.embedding for part in parts]))
        assert began.requests.tolist() == [i for i, each in enumerate(parts) for _ in each.requests]
        for layer, routed in enumerate(both.routed[step]):
            mine = [each.routed[step][layer] for each in alone]
            np.testing.assert_array_equal(routed.experts, np.concatenate([each.experts for each in mine]))
            expected = np.concatenate([each.scores for each in mine])
            np.testing.assert_allclose(routed.scores, expected, rtol=2e-3, atol=1e-4)


def test_embeddings_that_are_fed_are_what_it_sees(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    system = predictors.put(monkeypatch, lambda geometry: Diary("embedding"))
    with loaded(case.store, system=system) as model, torch.no_grad():
        ids = torch.tensor(case.prompts[:1])
        embeds = model.get_input_embeddings()(ids)
        model(input_ids=ids)
        model(inputs_embeds=2 * embeds)
        first, second = told(model).began
        assert first.embedding is not None and second.embedding is not None
        np.testing.assert_array_equal(first.embedding, embeds[0].half().float().numpy())
        np.testing.assert_array_equal(second.embedding, 2 * first.embedding)
        with pytest.raises(ValueError, match="read-only"):
            first.embedding[0] = 0


def test_nothing_is_collected_that_is_not_wanted(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    monkeypatch.setattr("expertly.engine.observe.find_routers", lambda *args: pytest.fail("nobody asked for routers"))
    system = predictors.put(monkeypatch, lambda geometry: Diary("experts"))
    with loaded(case.store, system=system) as model:
        generate(model, case.prompts, 3)
        diary = told(model)
    assert all(each.embedding is None for each in diary.began)
    for routed in (each for step in diary.routed for each in step):
        assert routed.experts is not None and routed.scores is None and routed.lookahead is None


def test_a_layer_whose_router_is_not_found_shows_what_it_chose(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]

    def partly(*args: Any) -> Any:
        routers = find_routers(*args)
        routers[1] = None
        return routers

    monkeypatch.setattr("expertly.engine.observe.find_routers", partly)
    system = predictors.put(monkeypatch, lambda geometry: Diary("experts", "scores"))
    with loaded(case.store, system=system) as model:
        generate(model, case.prompts, 3)
        diary = told(model)
    for step in diary.routed:
        for layer, routed in enumerate(step):
            assert routed.scores is not None and routed.experts is not None
            np.testing.assert_allclose(routed.scores.sum(-1), 1, atol=2e-3)
            chosen = np.take_along_axis(routed.scores, routed.experts, 1)
            assert (chosen > 0).all()
            assert ((routed.scores > 0).sum(-1) == 3).all() == (layer == 1)


def test_a_layer_that_cannot_be_asked_is_left_out_alone(
    cases: Cases, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = cases["qwen3_moe"]
    monkeypatch.setattr(
        "expertly.engine.observe.find_routers", lambda *args: [*find_routers(*args)[:1], None, find_routers(*args)[2]]
    )
    with loaded(case.store, system="expertly-ahead:distance=2") as model:
        assert generate(model, case.prompts) == case.tokens
        stats = expertly.stats(model).as_dict()
    assert stats["system"].startswith("expertly-ahead") and stats["prediction"]["layers_left_out"] == [1]
    assert [layer["decode"]["predicted"] > 0 for layer in stats["layers"]] == [False, False, True]
    assert "routers of layers [1]" in caplog.text


def test_a_model_that_cannot_look_ahead_says_so(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertly.engine.observe.find_routers", lambda model, layers: [None] * len(layers))
    with pytest.raises(ConfigError, match=r"routers of layers \[0, 1, 2\]"):
        expertly.load(str(cases["qwen3_moe"].store), system="lru:prediction=lookahead", memory="50%", device="cpu")
    assert not reader_threads()


def test_where_nothing_can_look_ahead_a_system_that_nobody_named_runs_without(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, without = cases["qwen3_moe"], "expertly"
    monkeypatch.setattr("expertly.engine.observe.find_routers", lambda model, layers: [None] * len(layers))
    monkeypatch.setattr("expertly.scheduler.systems.LEAST_LACKING_NBYTES", 1)
    with (
        loaded(case.store, system="auto", memory="50%") as model,
        loaded(case.store, system=without, memory="50%") as same,
    ):
        assert generate(model, case.prompts) == generate(same, case.prompts) == case.tokens
        actual, expected = expertly.stats(model).as_dict(), expertly.stats(same).as_dict()
        assert actual["system"] == without and actual["prediction"] is None
        assert (
            f"runs as {without}: " in actual["system_reason"]
            and "routers of layers [0, 1, 2]" in actual["system_reason"]
        )
        counts = ("hits", "misses", "bytes_loaded", "evicted_bytes", "prefetched")
        assert [actual["phases"]["decode"][count] for count in counts] == [
            expected["phases"]["decode"][count] for count in counts
        ]


def test_layers_that_run_by_themselves_are_not_shown(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    system = predictors.put(monkeypatch, lambda geometry: Diary("experts", "scores"))
    with loaded(case.store, system=system) as model, torch.no_grad():
        block = model.model.layers[1].mlp
        alone = block(torch.ones(1, 3, 32))
        generate(model, case.prompts, 2)
        torch.testing.assert_close(block(torch.ones(1, 3, 32)), alone)
        assert generate(model, case.prompts, 2) == [tokens[:2] for tokens in case.tokens]
        diary = told(model)
        assert len(diary.began) == 4
        assert [len(step) for step in diary.routed] == [3] * 4
