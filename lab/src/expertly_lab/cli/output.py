"""What the laboratory's commands print and write beside what every command prints with (expertly.cli.output)."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime, timezone
from typing import Any


def origin() -> dict[str, Any]:
    """When and by which command a file was made, for the file itself."""
    return {"created": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": typed()}


def typed() -> str:
    """This process's command line, quoted for a shell."""
    return shlex.join(["expertly", *sys.argv[1:]])


def printable(value: object) -> str:
    """A text from a file with control characters escaped, so that a terminal does not obey them."""
    text = str(value)
    return text if text.isprintable() else repr(text)
