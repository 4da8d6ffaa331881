"""The trace that `expertly lab reproduce` runs on where none is given: the demo model's answers to prompts made up
here.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

from expertly.cli.output import message
from expertly.core.errors import ExpertlyError
from expertly.store.cache import cache_folder

PROMPTS = {False: 90, True: 30}
"""By --quick."""
NEW_TOKENS = {False: 48, True: 32}

TEMPLATES = {
    "story": "Once upon a time there was {} who wanted to see {}. One morning",
    "question": "Question: what is {} good for, and why do people compare it with {}? Answer:",
    "sums": "{} costs 12 coins and {} costs 7 coins. How many coins do 3 of each cost? Let us think step by step.",
    "code": "def find(items):\n    # returns {} that comes before {} in the list\n",
    "instruction": "Instruction: write a short letter about {} to a friend who likes {}.\nResponse:",
}
FIRST = ("an old fisherman", "a clock", "the smallest boat", "a wooden bridge", "a grey cat", "the last train")
SECOND = ("the sea", "a garden", "the mountains", "music")


def demo_trace(quick: bool) -> Path:
    """Recorded at the first call, in full; kept in the cache folder. Raises what `expertly lab trace record` does."""
    folder = cache_folder() / "reproduce" / f"demo-{PROMPTS[quick]}"
    if (folder / "manifest.json").is_file():
        return folder
    message(f"expertly: recording the demo model's answers to {PROMPTS[quick]} prompts, once")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        prompts, made = Path(scratch) / "prompts.jsonl", Path(scratch) / folder.name
        prompts.write_text("".join(json.dumps(one) + "\n" for one in made_up(PROMPTS[quick])), encoding="utf-8")
        _record(prompts, made, NEW_TOKENS[quick])
        shutil.rmtree(folder, ignore_errors=True)  # what another version left
        with contextlib.suppress(OSError):  # another process was first
            made.replace(folder)
    if not (folder / "manifest.json").is_file():
        raise ExpertlyError(f"{folder}: the recording could not be kept; give --trace")
    return folder


def made_up(num: int) -> list[dict[str, str]]:
    """So many prompts of five categories in turn, no two alike."""
    pairs = [(first, second) for first in FIRST for second in SECOND]
    every = [
        {"prompt": template.format(*pairs[(5 * at + which) % len(pairs)]), "category": category}
        for at in range(len(pairs))
        for which, (category, template) in enumerate(TEMPLATES.items())
    ]
    return every[:num]


def _record(prompts: Path, out: Path, num_tokens: int) -> None:
    from expertly.cli.trace_record import TraceRecordOptions, run

    asked = TraceRecordOptions(
        prompts=str(prompts), out=out, full=True, system="resident", max_new_tokens=num_tokens, temperature=0.8
    )
    with contextlib.redirect_stdout(sys.stderr):
        run(asked)
