"""Systems that predict: the tokens of the unmodified model, whatever is guessed, late, dropped or fails."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.core.errors import ConfigError, TransferError
from expertly.scheduler.decisions import replay_file
from expertly.store.reader import ExpertFile
from tests.engine import predictors
from tests.engine.conftest import Case, Cases
from tests.engine.failing import FailOnce, interrupt_at_lines
from tests.engine.observe import loaded, prediction, reader_threads
from tests.engine.predictors import Everything, Failing, Slow
from tests.engine.test_batching import run_batch
from tests.families import generate, load_reference, logits_of, make_model, make_prompts

pytestmark = pytest.mark.timeout(120)

SETTINGS: dict[str, Any] = {"system": "fmoe", "memory": "50%"}

SPECS = (
    "fmoe",
    "fmoe:semantic=no:select=top-k:eviction=lru:scope=layer",
    "fmoe:trajectory=no:distance=1",
    "lru:prediction=lookahead:distance=2",
    "lru:prediction=speculative",
    "lcp:prediction=speculative:ahead=ring:distance=2:window=9",
    "lfu:prediction=counts:distance=2",
    "lcp:prediction=popularity:ahead=ring",
    "moe-infinity",
    "moe-infinity:distance=2:width=3:admission=best:eviction=fmoe",
)


def of_phases(model: Any, name: str) -> int:
    """A counter, over both phases."""
    return sum(int(phase[name]) for phase in expertly.stats(model).as_dict()["phases"].values())


def assert_loaded_ahead(model: Any) -> None:
    """It predicted, something of it was loaded ahead, and all of it came from the disk once."""
    stats = expertly.stats(model).as_dict()
    assert stats["prediction"]["failed"] is None
    assert of_phases(model, "predicted") > 0 and of_phases(model, "prefetched") > 0
    assert of_phases(model, "prefetched_bytes") > 0
    assert stats["memory_bytes"] < stats["expert_bytes"]


# -- lossless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "ernie4_5_moe", "jamba", "granitemoe", "switch_transformers"],
)
def test_fmoe_gives_the_tokens_and_logits_of_the_reference(family: str, cases: Cases) -> None:
    case = cases[family]
    with loaded(case.store, **SETTINGS, segments=4) as model:
        for _ in range(2):  # the second finds the maps of the first
            assert generate(model, case.prompts) == case.tokens
        torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)
        assert_loaded_ahead(model)
        assert prediction(model)["predictor"]["maps"] > 0


@pytest.mark.parametrize(("memory", "segments"), [("least", 1), ("least", 4), ("50%", 1), ("100%", 4)])
@pytest.mark.parametrize("system", SPECS)
def test_every_way_to_predict_is_lossless(system: str, segments: int, memory: str, cases: Cases) -> None:
    case = cases["qwen3_moe"]
    settings: dict[str, Any] = {"memory": memory}
    if memory == "least":  # one segment
        with loaded(case.store, memory="100%") as model:
            settings = {"memory": expertly.stats(model).as_dict()["expert_bytes"] // (24 * segments), "ring": 1}
    with loaded(case.store, system=system, segments=segments, **settings) as model:
        for prompts, expected in ((case.prompts, case.tokens), (case.prompts[:1], case.tokens[:1])):
            assert generate(model, prompts) == expected
        assert of_phases(model, "predicted") > 0
        if memory == "50%":
            for _ in range(20):  # a matcher on a busy machine may be late for all of a short answer
                if of_phases(model, "prefetched"):
                    break
                assert generate(model, case.prompts) == case.tokens
            assert_loaded_ahead(model)


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("matcher", ["thread", "inline"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "switch_transformers"])
def test_predicting_everything_all_the_time_is_lossless(
    family: str, matcher: str, segments: int, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases[family]
    system = predictors.put(monkeypatch, Everything)
    with loaded(case.store, system=system, segments=segments, matcher=matcher, memory="30%") as model:
        assert generate(model, case.prompts) == case.tokens
        assert generate(model, case.prompts[:1]) == case.tokens[:1]
        assert_loaded_ahead(model)


def test_predictions_for_the_stack_that_does_not_run_are_left_out(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder's layers do not run while the decoder does: loading them would be for nothing."""
    case = cases["switch_transformers"]
    system = predictors.put(monkeypatch, Everything)
    with loaded(case.store, system=system, matcher="inline", memory="50%") as model:
        assert generate(model, case.prompts) == case.tokens
        layers = expertly.stats(model).as_dict()["layers"]
        assert all(layer["decode"]["predicted"] == 0 < layer["prefill"]["predicted"] for layer in layers[:2])
        assert all(layer["decode"]["predicted"] > 0 for layer in layers[2:])


def test_fmoe_predicts_both_stacks_from_their_first_layers(cases: Cases) -> None:
    """The maps of the prompts foretell the encoder's layers, those of the first answers the decoder's."""
    case = cases["switch_transformers"]
    with loaded(case.store, system="fmoe:distance=1", matcher="inline", memory="50%") as model:
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens
        stats = expertly.stats(model).as_dict()
        predictor = stats["prediction"]["predictor"]
        assert predictor["left_out"] == 0
        assert predictor["semantic_searches"] > 0 and predictor["trajectory_searches"] > 0
        for phase, layers in (("prefill", range(2)), ("decode", range(2, 4))):
            for layer in layers:
                one = stats["layers"][layer][phase]
                assert one["predicted"] > 0 and one["prediction_accuracy"] > 0.3, (phase, layer)


@pytest.mark.parametrize("matcher", ["thread", "inline"])
def test_a_layer_that_runs_by_itself_while_others_are_loaded(
    matcher: str, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases["qwen3_moe"]
    system = predictors.put(monkeypatch, Everything)
    inputs = torch.ones(1, 3, 32)
    with torch.no_grad():
        expected = [layer.mlp(inputs) for layer in load_reference(case.folder).model.layers]
        with loaded(case.store, system=system, matcher=matcher, segments=4, memory="40%") as model:
            for _ in range(3):
                assert generate(model, case.prompts, 4) == [tokens[:4] for tokens in case.tokens]
                for layer, output in zip(model.model.layers, expected, strict=True):
                    torch.testing.assert_close(layer.mlp(inputs), output, rtol=1e-4, atol=1e-5)
            assert_loaded_ahead(model)


def test_beams_assistants_static_caches_and_embeddings(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    reference = load_reference(case.folder)
    assistant = make_model("qwen3_moe", seed=5)
    ids = torch.tensor(case.prompts[:1])

    def runs(model: Any) -> list[Any]:
        embeds = model.get_input_embeddings()(ids).detach()
        return [
            generate(model, case.prompts, num_beams=3, num_return_sequences=2, max_new_tokens=6),
            generate(model, case.prompts, cache_implementation="static"),
            generate(model, case.prompts[:1], assistant_model=assistant),
            generate(model, [case.prompts[0][:8] * 3], prompt_lookup_num_tokens=4),
            model.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=6).tolist(),
            generate(model, case.prompts, use_cache=False),
        ]

    expected = runs(reference)
    with loaded(case.store, **SETTINGS, segments=4) as model:
        assert runs(model) == expected
        assert_loaded_ahead(model)


def test_continuous_batching(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    reference = load_reference(case.folder)
    prompts = [*make_prompts(2, length=5, seed=2), *make_prompts(1, length=20, seed=3)]
    expected = [generate(reference, [prompt], 6)[0] for prompt in prompts]
    with loaded(case.store, **SETTINGS, segments=4) as model:
        for _ in range(2):
            assert run_batch(model, prompts) == expected
        assert_loaded_ahead(model)


def test_two_models_and_a_copy(cases: Cases) -> None:
    first, second = cases["qwen3_moe"], cases["gpt_oss"]
    with loaded(first.store, **SETTINGS) as one, loaded(second.store, **SETTINGS, segments=4) as two:
        twin = copy.deepcopy(one)
        for _ in range(2):
            assert generate(one, first.prompts, 4) == [tokens[:4] for tokens in first.tokens]
            assert generate(two, second.prompts) == second.tokens
            assert generate(twin, first.prompts) == first.tokens
        for model in (one, two):
            assert_loaded_ahead(model)
        matchers = [thread for thread in threading.enumerate() if thread.name == "expertly-matcher"]
        assert len(matchers) == 2, "one a model; a copy shares it"


def test_inline_predicts_the_same_again(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    found = []
    for _ in range(2):
        with loaded(case.store, system="fmoe", matcher="inline", segments=4) as model:
            generate(model, case.prompts)
            generate(model, case.prompts)
            predicted = prediction(model)
            assert predicted["predictions_late"] == predicted["contexts_dropped"] == 0
            found.append((predicted["predictor"], [of_phases(model, f"predicted{x}") for x in ("", "_needed")]))
    assert found[0] == found[1]


@pytest.mark.parametrize("matcher", ["thread", "inline"])
@pytest.mark.parametrize("system", ["fmoe", "lru:prediction=lookahead", "lru:prediction=speculative"])
def test_decisions_replay(system: str, matcher: str, cases: Cases, tmp_path: Path) -> None:
    case, path = cases["qwen3_moe"], tmp_path / "decisions.jsonl"
    with loaded(case.store, system=system, matcher=matcher, segments=2, memory="50%", decisions=path) as model:
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens
        assert_loaded_ahead(model)
    _, replayed = replay_file(path)
    assert replayed.difference is None and replayed.num_layers > 0


# -- late, dropped, failing ------------------------------------------------------------------------------------------


def test_a_slow_predictor_does_not_slow_the_model(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    made: list[Slow] = []

    def make(geometry: Any) -> Slow:
        made.append(Slow(geometry, 0.2))
        return made[0]

    system = predictors.put(monkeypatch, make)
    with loaded(case.store, system=system) as model:
        start = time.perf_counter()
        assert generate(model, case.prompts, 12) == case.tokens
        seconds = time.perf_counter() - start
        assert seconds < 36 * 0.2 / 2, "less than half of what predicting it all would take"
        stats = prediction(model)
        assert stats["contexts_dropped"] > 0
        assert made[0].num_calls + stats["contexts_dropped"] <= 12 * 4
        assert generate(model, case.prompts, 4) == [tokens[:4] for tokens in case.tokens]
        time.sleep(0.3)  # what was predicted meanwhile is of passes that are over
        generate(model, case.prompts[:1], 2)
        assert prediction(model)["predictions_late"] > 0


def test_a_predictor_that_fails_fails_one_pass(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    system = predictors.put(monkeypatch, lambda geometry: Failing(geometry, after=4))
    with loaded(case.store, system=system) as model:
        with pytest.raises(ValueError, match="the predictor gave up"):
            for _ in range(5):
                generate(model, case.prompts)
        handle(model).engine.scheduler.check()
        predicted = of_phases(model, "predicted")
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens, "it goes on without predictions"
        assert of_phases(model, "predicted") == predicted
        assert prediction(model)["failed"] == "ValueError: the predictor gave up"


@pytest.mark.parametrize("at", [1, 20, 60])
@pytest.mark.parametrize("segments", [1, 4])
def test_a_read_error_fails_one_pass(segments: int, at: int, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demand's or one that was loaded ahead."""
    case, fail = cases["qwen3_moe"], FailOnce(at)
    system = predictors.put(monkeypatch, Everything)
    with loaded(case.store, system=system, segments=segments, memory="30%") as model:
        monkeypatch.setattr(ExpertFile, "read_into", lambda *args: fail(*args))
        with pytest.raises(TransferError, match=r"experts-\d+\.safetensors.*Input/output error"):
            for _ in range(20):
                generate(model, case.prompts)
        scheduler = handle(model).engine.scheduler
        scheduler.check()
        assert not any(scheduler.slots.in_flight)
        assert generate(model, case.prompts) == case.tokens
        assert_loaded_ahead(model)


def test_a_pass_that_is_interrupted_leaves_the_next_one_right(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store, system="fmoe", matcher="inline") as model:
        generate(model, case.prompts)
        before = prediction(model)["predictor"]["maps"]

        def stop(*args: Any) -> None:
            raise RuntimeError("stop")

        for layer in (0, 1, 2):
            hook = model.model.layers[layer].register_forward_hook(stop)
            with pytest.raises(RuntimeError, match="stop"):
                generate(model, case.prompts)
            hook.remove()
        assert prediction(model)["predictor"]["maps"] == before, "passes that failed teach nothing"
        assert generate(model, case.prompts) == case.tokens


@pytest.mark.parametrize("matcher", ["thread", "inline"])
def test_an_interrupt_at_any_line_leaves_a_model_that_works_or_says_that_it_cannot(matcher: str, cases: Cases) -> None:
    settings = {"system": "fmoe", "memory": "50%", "matcher": matcher, "maps": "off"}
    interrupt_at_lines(
        cases["qwen3_moe"],
        range(3, 9000, 1307),
        lambda model: handle(model).engine.scheduler.check(),
        **settings,
    )


@contextlib.contextmanager
def slow_model(case: Case, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    system = predictors.put(monkeypatch, lambda geometry: Slow(geometry, 0.05))
    model, _ = expertly.load(str(case.store), system=system, memory="30%", device="cpu")
    yield model
    expertly.unload(model)


def test_unloading_while_it_matches(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    with slow_model(case, monkeypatch) as model:
        generate(model, case.prompts)
        start = time.perf_counter()
        expertly.unload(model)
        assert time.perf_counter() - start < 3.0
        assert not reader_threads(), "nor the matcher"


def test_a_model_that_is_dropped_ends_its_matcher(cases: Cases) -> None:
    import gc

    case = cases["qwen3_moe"]
    model, _ = expertly.load(str(case.store), system="fmoe", memory="30%", device="cpu", maps="off")
    generate(model, case.prompts)
    del model
    gc.collect()
    assert not reader_threads()


# -- what is said ----------------------------------------------------------------------------------------------------


def test_systems_that_do_not_predict_have_nothing_to_say(cases: Cases) -> None:
    with loaded(cases["qwen3_moe"].store) as model:
        generate(model, cases["qwen3_moe"].prompts)
        assert expertly.stats(model).as_dict()["prediction"] is None
        assert not [thread for thread in reader_threads() if thread.name == "expertly-matcher"]


def test_stats_tell_accuracy_by_distance(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store, system="lru:prediction=lookahead:distance=2", matcher="inline") as model:
        generate(model, case.prompts)
        stats = expertly.stats(model).as_dict()
        decode = stats["phases"]["decode"]
        assert set(decode["accuracy_by_distance"]) == {"1", "2"}
        assert all(0 < share <= 1 for share in decode["accuracy_by_distance"].values())
        assert stats["prediction"]["collect_s"] > 0
        assert stats["prediction"]["maps_file"] is None
        assert stats["layers"][0]["decode"]["accuracy_by_distance"] is None, "nothing looks ahead to the first"
        last = stats["layers"][-1]["decode"]
        for k, goodpred in last["goodpred_by_distance"].items():
            assert goodpred == last["accuracy_by_distance"][k] * last["fetch_rate_by_distance"][k]
        assert last["goodpred"] == last["prediction_accuracy"] * last["fetch_rate"]


def test_a_matcher_that_is_none(cases: Cases) -> None:
    with pytest.raises(ConfigError, match="matcher='fast': unknown; accepted: auto, thread, inline"):
        expertly.load(str(cases["qwen3_moe"].store), matcher="fast", device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="matcher='inline': system 'lru' predicts nothing"):
        expertly.load(str(cases["qwen3_moe"].store), matcher="inline", device="cpu")
    system = "lru:prediction=lookahead:transfer=synchronous"
    with pytest.raises(ConfigError, match=r"matcher='thread': .*transfer=synchronous.*accepted: auto, inline"):
        expertly.load(str(cases["qwen3_moe"].store), system=system, matcher="thread", device="cpu")


@pytest.mark.parametrize(
    ("system", "matcher", "runs"),
    [
        ("lru:prediction=lookahead", "auto", "thread"),
        ("lru:prediction=lookahead:transfer=synchronous", "auto", "inline"),
        ("lru:prediction=lookahead:transfer=synchronous", "inline", "inline"),
    ],
)
def test_where_a_system_predicts(system: str, matcher: Any, runs: str, cases: Cases) -> None:
    with loaded(cases["qwen3_moe"].store, system=system, matcher=matcher) as model:
        assert prediction(model)["matcher"] == runs
