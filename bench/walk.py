"""How far a newcomer walks to follow one token: the files and Python calls of one layer of one decode step.

    python bench/walk.py [--tokens 24] [--calls]

Counts calls of functions of the package (not transformers', torch's or C) on the thread that runs the model. `calls`:
of a token over its layers; `files`: of a token, and `of_each_layer` those of them that every layer calls; medians.
`of_two_loads`: of a layer that loads two experts, from where it is decided to where the next one is; the fewest: on a
busy machine experts arrive one by one, with a few calls more for each. Bounds in tests/test_walk.py.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from common import options, print_report

import expertly
from expertly.model.playing import forward

DECIDED = "engine/runtime.py", "forward_experts"
PACKAGE = str(Path(expertly.__file__).parent)
PROMPT = "The old man looked at the sea and said to his"


class Walk:
    """The calls of a thread: of each token, and from each layer that is decided to the next."""

    def __init__(self) -> None:
        self.tokens: list[Counter[tuple[str, str]]] = []
        self.layers: list[Counter[tuple[str, str]]] = []
        self._layer: Counter[tuple[str, str]] | None = None

    def __enter__(self) -> None:
        self._layer = None  # what comes before the first one belongs to none, as what comes after the last
        self.tokens.append(Counter())
        sys.setprofile(self)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        call = frame.f_code.co_filename.removeprefix(PACKAGE + "/"), frame.f_code.co_name
        self.tokens[-1][call] += 1
        if call == DECIDED:
            if self._layer is not None:
                self.layers.append(self._layer)
            self._layer = Counter()
        if self._layer is not None:
            self._layer[call] += 1


def run(system: str, memory: str, num_tokens: int, *, told: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model, tokenizer = expertly.load(memory=memory, system=system, device="cpu", dtype="float32")
    walk, num_layers = Walk(), len(model.get_decoder().layers)
    try:
        ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits, cache = forward(model, ids, None)
            for number in range(num_tokens):
                ids = logits.argmax(-1, keepdim=True)
                with walk if number >= num_tokens // 2 else nullcontext():  # the first ones fill the cache
                    logits, cache = forward(model, ids, cache)
        phase = expertly.stats(model).as_dict()["phases"]["decode"]
    finally:
        expertly.unload(model)
    if told:
        total: Counter[tuple[str, str]] = sum(walk.tokens, Counter())
        for (file, name), count in sorted(total.items(), key=lambda each: -each[1]):
            print(f"{count / len(walk.tokens):7.2f}  {file}: {name}")
    return {
        "system": system,
        "memory": memory,
        "files": statistics.median(len({file for file, _ in token}) for token in walk.tokens),
        "files_of_each_layer": statistics.median(
            len({file for (file, _), count in token.items() if count >= num_layers}) for token in walk.tokens
        ),
        "calls": statistics.median(token.total() / num_layers for token in walk.tokens),
        "misses_a_layer": (phase["misses"] + phase["partial_hits"]) / (phase["iterations"] or 1) / num_layers,
        **_of_two_loads(walk.layers),
    }


def _of_two_loads(layers: list[Counter[tuple[str, str]]]) -> dict[str, Any]:
    some = [layer for layer in layers if layer["scheduler/cache.py", "allocate"] == 2]
    return {
        "files_of_two_loads": min((len({file for file, _ in layer}) for layer in some), default=None),
        "calls_of_two_loads": min((layer.total() for layer in some), default=None),
    }


def main() -> None:
    args = options(__doc__, tokens=24, calls=False)
    rows = [
        run(system, memory, args.tokens, told=args.calls)
        for system, memory in (("resident", "100%"), ("lru", "25%"), ("expertly", "25%"))
    ]
    print_report("walk", rows, vars(args))


if __name__ == "__main__":
    main()
