"""The demo model's trace, recorded once and kept in the cache folder: what experiments run on where a user has none."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from expertly.core.errors import ExpertlyError
from expertly.store.cache import cache_folder
from expertly_lab.trace.writer import remove_trace

DEMO = "demo"
"""As `--trace` names it."""
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


def prompts(num: int) -> list[tuple[str, str]]:
    """So many prompts of five categories in turn, no two alike: (category, prompt)."""
    pairs = [(first, second) for first in FIRST for second in SECOND]
    every = [
        (category, template.format(*pairs[(5 * at + which) % len(pairs)]))
        for at in range(len(pairs))
        for which, (category, template) in enumerate(TEMPLATES.items())
    ]
    return every[:num]


def demo_trace(quick: bool, say: Callable[[str], None]) -> Path:
    """The demo model's answers to prompts made up here, recorded in full, once; in the cache folder."""
    folder = cache_folder() / "reproduce" / f"demo-{PROMPTS[quick]}"
    if (folder / "manifest.json").is_file():
        return folder
    say(f"expertly: recording the demo model's answers to {PROMPTS[quick]} prompts, once")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        _record(made, PROMPTS[quick], NEW_TOKENS[quick])
        try:
            remove_trace(folder)  # what another version left
            made.replace(folder)
        except OSError as error:
            if not (folder / "manifest.json").is_file():  # else another process was first
                raise ExpertlyError(f"{folder}: the recording could not be kept ({error}); give --trace") from None
    return folder


def _record(out: Path, num_prompts: int, num_tokens: int) -> None:
    from expertly import api
    from expertly.model.playing import answer
    from expertly_lab.playing import chooser
    from expertly_lab.recording import record

    model, tokenizer = api.load(None, system="resident", device="cpu")
    choose = chooser(0.8, 0)
    try:
        with record(model, out, full=True, name="demo") as recording:
            for category, prompt in prompts(num_prompts):
                tokens = tokenizer(prompt, return_token_type_ids=False)["input_ids"]
                recording.begin_request(category, prompt, len(tokens))
                answer(model, tokens, num_tokens, choose)
    finally:
        api.unload(model)
