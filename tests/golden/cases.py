"""Golden files: a JSON object with one line a case, and what differs between two of them."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expertly.cli.main import main

FOLDER = Path(__file__).resolve().parent
MEMORIES = ("10%", "25%", "50%")
SEGMENTS = (1, 4)

Case = dict[str, Any]
"""By field: a whole number, a list of them, or text."""


def case_name(system: str, memory: str, segments: int) -> str:
    return f"{system} {memory} P={segments}"


def system_of(name: str) -> str:
    """The system of the case of this name."""
    return name.split(" ")[0]


def preset_of(name: str) -> str:
    """The preset that the system of the case is, or is made of."""
    return system_of(name).split(":")[0]


def read_cases(file: str, folder: Path = FOLDER) -> dict[str, Case]:
    cases: dict[str, Case] = json.loads((folder / file).read_text(encoding="utf-8"))
    return cases


def write_cases(file: str, cases: Mapping[str, Case], folder: Path = FOLDER) -> None:
    lines = [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items()]
    (folder / file).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def differences(recorded: Mapping[str, Case], now_counted: Mapping[str, Case]) -> list[str]:
    """A line for each field of each case that is not what was recorded; none where all are equal."""
    lines = []
    for name in dict.fromkeys([*recorded, *now_counted]):
        if name not in now_counted or name not in recorded:
            lines.append(f"{name}: " + ("was not recorded" if name in now_counted else "did not run"))
            continue
        before, now = recorded[name], now_counted[name]
        for field in dict.fromkeys([*before, *now]):
            if before.get(field) != now.get(field):
                lines.append(f"{name}: {field}: recorded {before.get(field)}, now {now.get(field)}")
    return lines


def run_command(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and what `expertly ARGUMENTS --json` printed."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(io.StringIO()):
        status = main([*arguments, "--json"])
    printed: dict[str, Any] = json.loads(stdout.getvalue())
    return status, printed


def first_words(message: str, num: int = 4) -> str:
    """What an error says, without the part that is likely to be reworded."""
    return " ".join(message.split()[:num]).rstrip(",;:")
