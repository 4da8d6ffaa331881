"""How far a newcomer walks to follow one token: the files and Python calls of one layer of one decode step.

    python bench/walk.py [--tokens 24] [--calls]

Counts calls of functions of the package (not transformers', torch's or C) on the thread that runs the model, from one
decoder layer's forward to the next one's. Medians over layers and
tokens; of layers that load two experts, the quarter with the fewest: on a busy machine experts arrive one by one, with
a call or two more for each. Bounds: 8 files and 25 calls where every expert is resident, 16 and 120 with `expertly` at
25 %.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from common import options, print_report

import expertly
from expertly.model.playing import forward

PACKAGE = str(Path(expertly.__file__).parent)
PROMPT = "The old man looked at the sea and said to his"


class Walk:
    """The calls of a thread, cut where a decoder layer begins."""

    def __init__(self) -> None:
        self.layers: list[Counter[tuple[str, str]]] = []
        self._calls: Counter[tuple[str, str]] | None = None

    def step(self) -> None:
        """A decode step begins: what comes before its first layer belongs to none."""
        self._calls = None

    def layer_begins(self, *_: Any) -> None:
        if self._calls is not None:
            self.layers.append(self._calls)
        self._calls = Counter() if sys.getprofile() is self else None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if self._calls is not None:
            self._calls[frame.f_code.co_filename.removeprefix(PACKAGE + "/"), frame.f_code.co_name] += 1


def run(system: str, memory: str, num_tokens: int, *, told: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model, tokenizer = expertly.load(memory=memory, system=system, device="cpu", dtype="float32")
    walk = Walk()
    for layer in model.get_decoder().layers:
        layer.register_forward_pre_hook(walk.layer_begins)
    try:
        ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits, cache = forward(model, ids, None)
            for number in range(num_tokens):
                ids = logits.argmax(-1, keepdim=True)
                walk.step()
                if number >= num_tokens // 2:  # the first ones fill the cache
                    sys.setprofile(walk)
                logits, cache = forward(model, ids, cache)
                sys.setprofile(None)
        phase = expertly.stats(model).as_dict()["phases"]["decode"]
    finally:
        sys.setprofile(None)
        expertly.unload(model)
    if told:
        total: Counter[tuple[str, str]] = sum(walk.layers, Counter())
        for (file, name), count in sorted(total.items(), key=lambda one: -one[1]):
            print(f"{count / len(walk.layers):7.2f}  {file}: {name}")
    layers = phase["iterations"] * len(expertly.stats(model).as_dict()["layers"]) if phase["iterations"] else 1
    return {
        "system": system,
        "memory": memory,
        "files": statistics.median(len({file for file, _ in layer}) for layer in walk.layers),
        "calls": statistics.median(sum(layer.values()) for layer in walk.layers),
        "mean_calls": statistics.mean(sum(layer.values()) for layer in walk.layers),
        "misses_a_layer": (phase["misses"] + phase["partial_hits"]) / layers,
        **_of_two_loads(walk.layers),
    }


def _of_two_loads(layers: list[Counter[tuple[str, str]]]) -> dict[str, Any]:
    some = [layer for layer in layers if layer["scheduler/cache.py", "allocate"] == 2]
    return {
        "files_of_two_loads": _quarter(len({file for file, _ in layer}) for layer in some),
        "calls_of_two_loads": _quarter(sum(layer.values()) for layer in some),
    }


def _quarter(numbers: Iterable[int]) -> int | None:
    """What a quarter of them does not exceed."""
    ordered = sorted(numbers)
    return ordered[len(ordered) // 4] if ordered else None


def main() -> None:
    args = options(__doc__, tokens=24, calls=False)
    rows = [
        run(system, memory, args.tokens, told=args.calls)
        for system, memory in (("resident", "100%"), ("lru", "25%"), ("expertly", "25%"))
    ]
    print_report("walk", rows, vars(args))


if __name__ == "__main__":
    main()
