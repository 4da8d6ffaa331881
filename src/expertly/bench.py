"""What `expertly bench` runs: the same prompts through several systems, in turns on this machine's clock."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from expertly import api
from expertly.core.errors import ConfigError, ExpertlyError
from expertly.model.generation import max_positions
from expertly.model.playing import Played, answer
from expertly.model.prompts import AskedPrompt, Prompt, asked
from expertly.scheduler.systems import BASE_SYSTEM, get_runnable
from expertly.store.packed import PackedStore

USUAL = (BASE_SYSTEM, "expertly", "expertly-ahead")
"""What always runs."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What runs, and how often."""

    model: str | None
    load: dict[str, Any]  # other arguments of `expertly.load`
    systems: tuple[str, ...]
    num_tokens: int  # of each answer, at most
    rounds: int
    is_raw: bool = False  # prompts are texts, whatever chat template the model has


@dataclass(frozen=True, slots=True)
class BenchBudget:
    """An amount of memory, as the user said it and in bytes."""

    memory: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class BenchTurn:
    """One system's answers to all prompts, loaded anew."""

    answers: tuple[tuple[int, ...], ...]
    times: tuple[Played, ...]
    hit_rate: float | None  # while the answers were decoded
    loaded_nbytes: int  # likewise

    @property
    def seconds(self) -> float:
        return sum(played.seconds for played in self.times)


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One system's figures under one budget; `reason`: why it has none. Times are medians over requests and rounds."""

    memory: str
    memory_bytes: int
    system: str
    tpot_s: float | None = None
    ttft_s: float | None = None
    tokens_per_s: float | None = None  # of answers, with the time of their prompts
    hit_rate: float | None = None
    bytes_per_token: float | None = None  # loaded for each token of an answer after its first
    ratio: float | None = None  # median over rounds of its time / that of BASE_SYSTEM in the same round
    ratio_low: float | None = None  # the smallest of them
    ratio_high: float | None = None
    reason: str | None = None


class Bench:
    """Runs systems in turns. Each turn loads the model anew, with empty caches; the order of the systems
    changes from round to round.
    """

    def __init__(self, settings: BenchSettings, progress: api.Progress, loading: api.Progress) -> None:
        """`progress` is told of turns, `loading` of bytes packed and loaded. Raises ConfigError for a system that no
        engine can run.
        """
        for name in settings.systems:
            get_runnable(name)
        self.settings = settings
        self.store: PackedStore | None = None  # once something was loaded
        self._progress = progress
        self._loading = loading
        self._num_turns = 0
        self._first: tuple[str, BenchTurn] | None = None  # whose answers all others must equal

    def prepare(
        self, memories: Sequence[dict[str, str]], prompts: Sequence[Prompt]
    ) -> tuple[list[BenchBudget], list[AskedPrompt], list[str]]:
        """What each of the `memories` (arguments `memory` or `total_memory` of `expertly.load`) comes to, the prompts
        as tokens, and sentences for those left out. Answers one prompt under each, so that what only a first load does
        is not timed. Raises as `expertly.load` does, and ConfigError where no prompt is left.
        """
        budgets, requests, left_out = list[BenchBudget](), list[AskedPrompt](), list[str]()
        for memory in memories:
            with self._loaded(BASE_SYSTEM, **memory) as (model, tokenizer):
                handle, limit = api.handle(model), max_positions(model)
                self.store = handle.store
                most = None if limit is None else limit - self.settings.num_tokens
                requests, left_out = asked(prompts, tokenizer, is_raw=self.settings.is_raw, most=most)
                if not requests:
                    raise ConfigError(f"prompts: {'; '.join(left_out)}")
                answer(model, requests[0].tokens, 2)
                said = memory.get("total_memory") or memory["memory"]
                budgets.append(BenchBudget(said, handle.division.budget.memory_nbytes))
        return budgets, requests, left_out

    def run(self, budget: BenchBudget, prompts: Sequence[AskedPrompt], num_budgets: int = 1) -> list[BenchRow]:
        """The rows of one budget. A system that fails is one with its reason, and does not run again. Raises
        ExpertlyError where two systems answer differently.
        """
        settings = self.settings
        turns: dict[str, list[BenchTurn]] = {name: [] for name in settings.systems}
        failed: dict[str, str] = {}
        for number in range(settings.rounds):
            shift = number % len(settings.systems)
            for name in (*settings.systems[shift:], *settings.systems[:shift]):
                if name not in failed:
                    try:
                        turn = self._turn(name, budget, prompts)
                    except ExpertlyError as error:
                        failed[name] = str(error)
                    except Exception as error:  # of the system's own code, or memory ran out: others go on
                        failed[name] = f"{type(error).__name__}: {error}"
                    else:
                        self._check_answers(name, turn, prompts)
                        turns[name].append(turn)
                self._num_turns += 1
                total = settings.rounds * len(settings.systems) * num_budgets
                self._progress(f"{budget.memory}, {name}", self._num_turns, total)
        base = [] if BASE_SYSTEM in failed else turns[BASE_SYSTEM]
        return [
            BenchRow(budget.memory, budget.nbytes, name, **_figures(turns[name], base))
            if name not in failed
            else BenchRow(budget.memory, budget.nbytes, name, reason=failed[name])
            for name in settings.systems
        ]

    @contextmanager
    def _loaded(self, system: str, **memory: Any) -> Iterator[tuple[Any, Any]]:
        settings = self.settings
        options = {**settings.load, **memory, "system": system}
        model, tokenizer = api.load(settings.model, progress=self._loading, **options)
        try:
            yield model, tokenizer
        finally:
            api.unload(model)

    def _turn(self, name: str, budget: BenchBudget, prompts: Sequence[AskedPrompt]) -> BenchTurn:
        with self._loaded(name, memory=budget.nbytes) as (model, _):
            played = [answer(model, prompt.tokens, self.settings.num_tokens) for prompt in prompts]
            answers, times = zip(*played, strict=True)
            decode = api.stats(model).as_dict()["phases"]["decode"]
            return BenchTurn(answers, times, decode["hit_rate"], decode["bytes_loaded"])

    def _check_answers(self, name: str, turn: BenchTurn, prompts: Sequence[AskedPrompt]) -> None:
        """Raises ExpertlyError where the answers are not those of the first turn: systems never change tokens."""
        if self._first is None:
            self._first = name, turn
        first, reference = self._first
        for prompt, expected, tokens in zip(prompts, reference.answers, turn.answers, strict=True):
            for place, (wanted, token) in enumerate(zip_longest(expected, tokens)):
                if wanted != token:
                    raise ExpertlyError(
                        f"{name} answers the prompt in line {prompt.prompt.line} differently from {first}: token "
                        f"{place} is {token}, not {wanted}; no system may change tokens: please report it"
                    )


def _figures(turns: Sequence[BenchTurn], base: Sequence[BenchTurn]) -> dict[str, Any]:
    times = [played for turn in turns for played in turn.times]
    steps = [played.tpot_s for played in times if played.tpot_s is not None]
    rates = [turn.hit_rate for turn in turns if turn.hit_rate is not None]
    num_decoded = sum(len(played.steps_s) for played in times)
    num_tokens = sum(len(tokens) for turn in turns for tokens in turn.answers)
    ratios = [turn.seconds / other.seconds for turn, other in zip(turns, base, strict=False)]
    return {
        "tpot_s": statistics.median(steps) if steps else None,
        "ttft_s": statistics.median(played.ttft_s for played in times),
        "tokens_per_s": num_tokens / sum(turn.seconds for turn in turns),
        "hit_rate": statistics.mean(rates) if rates else None,
        "bytes_per_token": sum(turn.loaded_nbytes for turn in turns) / num_decoded if num_decoded else None,
        "ratio": statistics.median(ratios) if ratios else None,
        "ratio_low": min(ratios, default=None),
        "ratio_high": max(ratios, default=None),
    }


def fastest(rows: Sequence[BenchRow]) -> BenchRow | None:
    """The fastest of one budget's rows; None where nothing ran."""
    ran = [row for row in rows if row.reason is None]
    return min(ran, key=lambda row: row.ratio or 1 / (row.tokens_per_s or 1), default=None)
