"""What the laboratory's commands print and write beside what every command prints with (expertly.cli.output)."""

from __future__ import annotations

import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from expertly.core.resources import allowed_cpus, cpu_name
from expertly.core.units import counted


def origin() -> dict[str, Any]:
    """When and by which command a file was made, for the file itself."""
    return {"created": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": typed()}


def typed() -> str:
    """This process's command line, quoted for a shell."""
    return shlex.join(["expertly", *sys.argv[1:]])


def commit() -> str | None:
    """Of the checkout that this code runs from, "-dirty" where files of it changed; None where it is installed."""
    git, file = ["git", "-C", str(Path(__file__).parent)], Path(__file__).name
    try:
        for command in (["ls-files", "--error-unmatch", file], ["describe", "--always", "--dirty", "--exclude=*"]):
            answer = subprocess.run([*git, *command], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def machine() -> str:
    return f"{counted(allowed_cpus(), 'core')} of {cpu_name()}"


def printable(value: object) -> str:
    """A text from a file with control characters escaped, so that a terminal does not obey them."""
    text = str(value)
    return text if text.isprintable() else repr(text)
