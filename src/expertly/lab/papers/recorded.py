"""Traces that are recorded here, where a user has none: of the demo model, and of a small Switch model that nobody
trained. Each is made once and kept in the cache folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from expertly.core.errors import ExpertlyError
from expertly.lab.papers.runs import Subject
from expertly.store.cache import cache_folder
from expertly.trace.writer import remove_trace

PROMPTS = {False: 90, True: 30}
"""By --quick."""
NEW_TOKENS = {False: 48, True: 32}
TEMPLATES = {
    "story": "Once upon a time there was {} who wanted to see {}. One morning",
    "question": "Question: what is {} good for, and why do people compare it with {}? Answer:",
    "sums": "{} costs 12 coins and {} costs 7 coins. How many coins do 3 of each cost? Let us think step by step.",
    "code": "def find_experiment(items):\n    # returns {} that comes before {} in the list\n",
    "instruction": "Instruction: write a short letter about {} to a friend who likes {}.\nResponse:",
}
FIRST = ("an old fisherman", "a clock", "the smallest boat", "a wooden bridge", "a grey cat", "the last train")
SECOND = ("the sea", "a garden", "the mountains", "music")


def made_up(num: int) -> list[tuple[str, str]]:
    """So many prompts of five categories in turn, no two alike: (category, prompt)."""
    pairs = [(first, second) for first in FIRST for second in SECOND]
    every = [
        (category, template.format(*pairs[(5 * at + which) % len(pairs)]))
        for at in range(len(pairs))
        for which, (category, template) in enumerate(TEMPLATES.items())
    ]
    return every[:num]


def demo_trace(quick: bool, say: Callable[[str], None]) -> Path:
    """The demo model's answers to prompts made up here, recorded in full."""

    def make(out: Path) -> None:
        from expertly import api
        from expertly.lab.playing import answer, chooser

        model, tokenizer = api.load(None, system="resident", learned="off", device="cpu")
        choose = chooser(0.8, 0)
        prompts = made_up(PROMPTS[quick])
        ids = tokenizer([prompt for _, prompt in prompts], return_token_type_ids=False)["input_ids"]
        requests = [(*prompt, tokens) for prompt, tokens in zip(prompts, ids, strict=True)]
        _record(model, out, "demo", requests, lambda tokens: answer(model, tokens, NEW_TOKENS[quick], choose))

    return _once(f"demo-{PROMPTS[quick]}", make, f"the demo model's answers to {PROMPTS[quick]} prompts", say)


SWITCH = "switch, random weights"
SWITCH_REQUESTS, SWITCH_PROMPT, SWITCH_ANSWER = 40, 32, 48


def switch(seed: int, say: Callable[[str], None]) -> Subject:
    """An encoder-decoder: a small Switch model with random weights, whose routing is no trained model's."""

    def make(out: Path) -> None:
        import torch

        from expertly import api
        from expertly.model.generation import generate, generation_config
        from expertly.model.made_up import VOCABULARY, write_switch
        from expertly.model.packing import pack

        dice = Random(seed)
        with tempfile.TemporaryDirectory() as scratch, torch.random.fork_rng(devices=[]):
            write_switch(Path(scratch, "checkpoint"), seed)
            pack(Path(scratch, "checkpoint"), Path(scratch, "store"), codec="none")
            model, _ = api.load(str(Path(scratch, "store")), system="resident", learned="off", device="cpu")
            config = generation_config(model, SWITCH_ANSWER, temperature=1.0)
            prompts = [[dice.randrange(1, VOCABULARY) for _ in range(SWITCH_PROMPT)] for _ in range(SWITCH_REQUESTS)]
            torch.manual_seed(seed)
            requests = [(None, None, tokens) for tokens in prompts]
            _record(model, out, SWITCH, requests, lambda tokens: generate(model, tokens, config))

    what = f"answers of a small Switch model with random weights to {SWITCH_REQUESTS} prompts"
    made = Subject.open(_once(f"switch-{SWITCH_REQUESTS}-{seed}", make, what, say))
    return replace(made, name=SWITCH, sizes=f"{made.sizes}; nobody trained it: its routing is that of random weights")


def _record(
    model: Any,
    out: Path,
    name: str,
    requests: Iterable[tuple[str | None, str | None, Sequence[int]]],
    respond: Callable[[Sequence[int]], object],
) -> None:
    """Requests are (category, prompt, tokens). Unloads the model."""
    from expertly import api
    from expertly.lab.recording import record

    try:
        with record(model, out, full=True, name=name) as recording:
            for category, prompt, tokens in requests:
                recording.begin_request(category, prompt, len(tokens))
                respond(tokens)
    finally:
        api.unload(model)


def _once(name: str, make: Callable[[Path], None], what: str, say: Callable[[str], None]) -> Path:
    """The trace of this name in the cache folder; `make` writes it where it is not there."""
    folder = cache_folder() / "reproduce" / name
    if (folder / "manifest.json").is_file():
        return folder
    say(f"expertly: recording {what}, once")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        make(made)
        try:
            remove_trace(folder)  # what another version left
            made.replace(folder)
        except OSError as error:
            if not (folder / "manifest.json").is_file():  # else another process was first
                raise ExpertlyError(f"{folder}: the recording could not be kept ({error}); give --trace") from None
    return folder
