"""What the engine counts while the demo model generates a few tokens, of every preset that it can run.

In float32, with one thread, what is routed and predicted is the same in every run. What is not: who prefetches finds
more or less of it there, as the disk is fast or slow; that moves hits, what is evicted, and what is still prefetched.
So a system that predicts has two kinds of cases: at every memory all counts, with transfers that take no time (see
`make_transfers_instant`); and at one memory, as users run it ("as it is"), the counts that do not depend on time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import expertly
from expertly.scheduler.systems import SYSTEMS
from tests.golden.cases import MEMORIES, SEGMENTS, Case, case_name, first_words, preset_of

FILE = "engine.json"
PROMPTS = (
    [704, 2276, 701, 4491, 565, 280, 2989],  # The old man looked at the sea
    [2144, 5154, 8, 3792, 2064],  # def largest(numbers):
)
NUM_NEW_TOKENS = 6
TIMELESS = ("iterations", "tokens", "demands", "demanded_bytes", "predicted", "predicted_needed", "predicted_of")
"""Counts that do not depend on when something arrives; `demands` are hits, partial hits and misses."""
COUNTS = (
    *("iterations", "tokens", "hits", "partial_hits", "misses", "demanded_bytes", "hit_bytes", "evicted_bytes"),
    *("bytes_loaded", "prefetched_bytes", "wasted_bytes", "predicted", "predicted_needed"),
    *("predicted_resident", "predicted_of", "prefetched", "prefetched_needed", "prefetched_in_time"),
)
AS_IT_IS = " as it is"
REFUSED = ("belady", "belady-global", "oracle", "modelled-lookahead", "mixtral-offloading", "moe-infinity-lfu")
"""They know the future, or are for simulation: an engine says that it cannot run them."""
NUM_RUNS = 3


def make_transfers_instant(model: Any) -> None:
    """Let reads take no time for who looks at them: what is asked for is there when it has been asked for.

    THE ONE PLACE THAT KNOWS INTERNALS: where these change, it is to be written anew, with the same counts.
    """
    from expertly.api import handle

    device: Any = handle(model).engine.device
    submit, prefetch, wait = device.submit, device.prefetch, device.wait
    arrived: deque[Any] = deque()

    def finish(ask: Callable[[list[Any]], None], spans: Iterable[Any]) -> None:
        asked = list(spans)
        ask(asked)
        result = {wait() for _ in asked}
        assert result == set(asked)
        arrived.extend(asked)

    device.submit = partial(finish, submit)
    device.prefetch = partial(finish, prefetch)
    device.poll = lambda: arrived.popleft() if arrived else None
    device.wait = arrived.popleft


def case_names() -> list[str]:
    """Of all cases."""
    names, as_they_are = [], []
    for preset, of_preset in SYSTEMS.items():
        if preset in REFUSED:
            names.append(case_name(preset, "25%", 1))
            continue
        memories = ("25%", "100%") if preset == "resident" else MEMORIES
        names += [case_name(preset, memory, segments) for memory in memories for segments in SEGMENTS]
        if of_preset.prediction != "none":
            as_they_are.append(case_name(preset, "25%", 4) + AS_IT_IS)
    return [*names, *as_they_are]


def run(name: str) -> Case:
    """The case of this name. One that cannot run is the first words of its error."""
    import torch
    from transformers import GenerationConfig

    system, memory, segments = name.removesuffix(AS_IT_IS).split(" ")
    predicts = SYSTEMS[preset_of(name)].prediction != "none"
    spec = system if system == "resident" else f"{system}:segments={segments.removeprefix('P=')}"
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, _ = expertly.load(system=spec, memory=memory, device="cpu", dtype="float32")
    except Exception as error:  # whichever: it is compared
        return {"error": first_words(str(error).replace(spec, system))}
    try:
        if predicts and not name.endswith(AS_IT_IS):
            make_transfers_instant(model)
        config = GenerationConfig(max_new_tokens=NUM_NEW_TOKENS, min_new_tokens=NUM_NEW_TOKENS, do_sample=False)
        tokens = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            tokens.append(output[0, len(prompt) :].tolist())
        phases = expertly.stats(model).as_dict()["phases"]
    finally:
        expertly.unload(model)
        torch.set_num_threads(num_threads)
    fields = TIMELESS if name.endswith(AS_IT_IS) else COUNTS
    for counts in phases.values():
        counts["demands"] = counts["hits"] + counts["partial_hits"] + counts["misses"]
    of_phases = {f"{phase}_{field}": counts[field] for phase, counts in phases.items() for field in fields}
    return {"output": tokens, **of_phases}


def record(systems: Sequence[str]) -> dict[str, Case]:
    """All cases of these presets. Raises AssertionError where several runs of one do not agree."""
    cases = {}
    for name in case_names():
        if preset_of(name) not in systems:
            continue
        cases[name] = run(name)
        for _ in range(NUM_RUNS - 1):
            again = run(name)
            assert again == cases[name], f"{name}: {cases[name]}, then {again}"
    return cases
