"""From prompts to a saved choice, on the engine: what it takes is measured, or told by a player in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly.cli.tune import SHOWN, report, result_of
from expertly.core.costs import Link
from expertly.core.errors import ConfigError, ModelUseError
from expertly.engine.choice import choices_path, read_choices
from expertly.lab.playing import Played, RecordedRequest
from expertly.lab.prompts import Prompt
from expertly.lab.tune.search import Candidate
from expertly.lab.tune.settings import TuneOptions
from expertly.lab.tune.tune import Tuned, keep_learned, save, tune
from expertly.lab.tune.verdict import MIN_TURNS, CandidatePlayer
from expertly.model.packing import pack_cached
from expertly.scheduler.presets import BASE_SYSTEM
from expertly.sim.hardware import Hardware
from expertly.store.cache import learned_beside
from tests.families import make_checkpoint
from tests.lab.tune.toys import FakeClock

TEXTS = ("Once upon a time", "2 + 2 =", "def f(x):", "Dear Sir,")
PROMPTS = [Prompt(line, text, None) for line, text in enumerate(TEXTS, 1)]

OPTIONS = TuneOptions(memory="50%", codec="none", max_new_tokens=6, time_limit=100.0, seed=0)


class Biased:
    """Runs what it is told to on the engine, and says that it took `seconds(candidate)` a request, which it does by the
    clock.
    """

    def __init__(self, player: CandidatePlayer, seconds: Callable[[Candidate], float], clock: FakeClock) -> None:
        self._player = player
        self._seconds = seconds
        self._clock = clock

    def play(self, candidate: Candidate, request: RecordedRequest) -> Played:
        steps = len(self._player.play(candidate, request).steps_s)
        seconds = self._seconds(candidate)
        self._clock.now += seconds
        return Played(0.5 * seconds, (0.5 * seconds / steps,) * steps)


def no_machine() -> Hardware:
    raise AssertionError("the model's own times do")


@pytest.fixture(scope="module", autouse=True)
def hardware() -> Iterator[None]:
    """What would be measured: a link on which loading an expert takes as long as a layer, and loading ahead pays. What
    is simulated does not depend on what else this machine does.
    """
    slow = replace(Hardware.read("infinite"), layer_ns=300_000, link=Link(20e6, 0, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("expertly.lab.tune.tune.measure_hardware", lambda *_: (slow, "made up"))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny", seed=7, tokenizer=True)


def tuned(model: Path, seconds: Callable[[Candidate], float], make: type[Biased] = Biased, **changes: Any) -> Tuned:
    """By a clock on which looking at it takes half a second, and nothing else takes any time but requests."""
    clock = FakeClock(step=0.5)
    wishes = replace(OPTIONS, model=str(model), **changes)
    found = tune(wishes, PROMPTS, no_machine, clock=clock, make_player=lambda player: make(player, seconds, clock))
    assert clock.now <= max(wishes.time_limit, 30.0), "what cannot be cut short takes little by this clock"
    return found


@pytest.fixture(scope="module")
def fastest(model: Path) -> Tuned:
    """Where everything takes half of what lru takes."""
    return tuned(model, lambda one: 1.0 if one.system.name == BASE_SYSTEM else 0.5)


def test_the_fastest_is_saved_and_used(model: Path, fastest: Tuned) -> None:
    assert fastest.verdict.is_verified and fastest.choice.system != BASE_SYSTEM
    assert fastest.choice.gains[-1].over == "lru"
    assert fastest.choice.gains[-1].ratio == pytest.approx(0.5) and fastest.choice.gains[-1].num_turns >= MIN_TURNS
    assert fastest.seen.workload.num_requests == 4 and len(fastest.seen.workload.requests) == 2
    assert fastest.found.num_scored > 10 and not fastest.found.is_whole, "time is kept by trying less"
    path = save(fastest)
    assert path is not None
    (read,) = read_choices(path, *_identity(fastest))
    assert read == fastest.choice
    run, _ = expertly.load(str(model), memory="50%", system="auto", codec="none", learned=None)
    stats = expertly.stats(run).as_dict()
    expertly.unload(run)
    assert stats["system"] == fastest.choice.system and stats["segments"] == fastest.choice.segments
    assert "0.50x the time of lru" in stats["system_reason"]


class Failing(Biased):
    def play(self, candidate: Candidate, request: RecordedRequest) -> Played:
        if candidate.system.prediction != "none":
            raise ConfigError("no such luck")
        return super().play(candidate, request)


@pytest.fixture(scope="module")
def slower(model: Path) -> Tuned:
    """Where everything is slower than lru, and what predicts fails."""
    return tuned(model, lambda one: 1.0 if one.system.name == BASE_SYSTEM else 1.5, make=Failing)


def test_where_lru_is_the_fastest_it_is_what_is_saved(slower: Tuned) -> None:
    """And what fails on the engine is left out, and named."""
    assert slower.choice.system == BASE_SYSTEM and slower.verdict.is_verified
    assert "nothing" in slower.verdict.why
    failed = [*slower.calibration.failed.values(), *slower.verdict.failed.values()]
    assert failed and set(failed) == {"no such luck"}
    path = save(slower)
    assert path is not None and read_choices(path, *_identity(slower))[-1].system == BASE_SYSTEM


def test_what_learns_is_kept_with_what_it_learned(model: Path, tmp_path: Path) -> None:
    """So that it is from then on as fast as it was measured to be."""
    store = pack_cached(str(make_checkpoint("qwen3_moe", tmp_path / "other", seed=10, tokenizer=True)), codec="none")
    learned = tmp_path / "learned"
    learned.write_bytes(b"what it learned")
    for system, kind in (("lru", None), ("moe-infinity", "matrices"), ("fmoe", "maps")):
        keep_learned(learned, system, store)
        assert kind is None or learned_beside(store.folder, kind).read_bytes() == b"what it learned"
    learned.write_bytes(b"something else")
    keep_learned(learned, "fmoe", store)
    assert learned_beside(store.folder, "maps").read_bytes() == b"what it learned", "what is there stays"


def test_without_time_nothing_is_chosen_and_nothing_saved(model: Path) -> None:
    found = tuned(model, lambda one: 0.1, time_limit=1.0)
    assert not found.verdict.is_verified and found.choice.system == BASE_SYSTEM
    assert found.seen.workload.num_requests >= 2, "two are recorded in any case"
    choices_path(found.store).unlink(missing_ok=True)
    assert save(found) is None and not choices_path(found.store).exists()


def test_all_memory_is_for_all_to_stay(model: Path) -> None:
    found = tuned(model, lambda one: 0.5 if one.system.keeps_everything else 1.0, memory="100%")
    assert "resident" in {one.candidate.system.name for one in found.found.ranking}


def test_what_the_model_cannot_be_given_is_an_error(model: Path) -> None:
    for prompts in (["only one"], ["", ""], ["x" * 2000, "y"]):
        with pytest.raises(ConfigError, match="can be given to this model; accepted: at least 2"):
            asked = [Prompt(line, text, None) for line, text in enumerate(prompts, 1)]
            tune(replace(OPTIONS, model=str(model)), asked, no_machine)


def test_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    other = make_checkpoint("switch_transformers", tmp_path / "other", seed=37, tokenizer=True)
    told: list[tuple[str, int, int]] = []
    with pytest.raises(ModelUseError, match="encoder-decoder"):
        tune(replace(OPTIONS, model=str(other)), PROMPTS, no_machine, loading=lambda *one: told.append(one))
    assert [what for what, done, total in told if done == total] == ["packing"], "it is shown while it takes long"


def test_both_codecs_that_are_packed_are_tried(tmp_path: Path) -> None:
    other = make_checkpoint("qwen3_moe", tmp_path / "other", seed=9, tokenizer=True)
    for codec in ("none", "planes"):
        pack_cached(str(other), codec=codec)
    found = tuned(other, lambda one: 0.5 if one.codec == "planes" else 1.0, codec="auto")
    assert {one.candidate.codec for one in found.found.ranking} == {"none", "planes"}
    assert save(found) is not None
    run, _ = expertly.load(str(other), memory="50%", system="auto", learned=None)
    stats = expertly.stats(run).as_dict()
    expertly.unload(run)
    assert stats["codec"]["name"] == found.choice.codec


def test_the_report_says_what_was_simulated_alone(fastest: Tuned, slower: Tuned) -> None:
    """And what could not be run, whenever that was found out."""
    for found in (fastest, slower):
        result = result_of(TuneOptions(model="tiny", memory="50%"), found, None)
        text, calibration = report(result), found.calibration
        for one, row in zip(found.found.ranking, result["search"]["ranking"], strict=True):
            assert row["overhead_s"] == calibration.overhead_s(one.candidate)
            assert row["unmeasured"] == [f"{part}={name}" for part, name in calibration.unmeasured(one.candidate)]
        shown = result["search"]["ranking"][:SHOWN]
        assert text.count("not measured\n") == sum(bool(row["unmeasured"]) for row in shown)
        for candidate, reason in calibration.failed.items():
            assert result["failed"][candidate.label] == reason and f"left out: {candidate.label}: {reason}" in text
    assert calibration.failed and any(row["unmeasured"] for row in result["search"]["ranking"])


def test_what_the_simulator_leaves_out_counts_in_the_search(model: Path) -> None:
    """Predicting takes seconds on this engine and nothing in the simulator: what predicts is ranked with them."""
    found = tuned(model, lambda one: 1.0 if one.system.prediction == "none" else 9.0)
    assert any(part == "prediction" and seconds > 0.1 for (part, _), seconds in found.calibration.overheads_s.items())
    requests, counted = found.seen.workload.requests, 0
    for one in found.found.ranking:
        steps = sum(len(request.tokens) - request.num_prompt for request in requests[: one.num_requests])
        overhead_s = found.calibration.overhead_s(one.candidate) * steps
        assert one.seconds >= overhead_s
        counted += overhead_s > 0.1
    assert counted, "some of what predicts was ranked"


def _identity(found: Tuned) -> tuple[str, str]:
    return found.store.manifest.identity, found.store.manifest.dtype
