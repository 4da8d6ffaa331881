"""Draw what a command prints, as it stands in a terminal: docs/images/run.svg.

python tools/terminal_picture.py docs/images/run.svg expertly run demo "Who are you?" --memory 25%
"""

from __future__ import annotations

import shlex
import subprocess
import sys

from rich.console import Console
from rich.text import Text

WIDTH = 110


def draw(path: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    console = Console(record=True, width=WIDTH, file=open("/dev/null", "w"))  # noqa: SIM115 - it lives as long as we do
    console.print(Text(f"$ {shlex.join(command)}", style="bold green"))
    console.print(Text(done.stdout.rstrip() + "\n"))
    *_, line, budget = done.stderr.rstrip("\n").split("\n")
    console.print(Text(f"{line}\n{budget}", style="dim"))
    console.save_svg(path, title="expertly")


if __name__ == "__main__":
    draw(sys.argv[1], sys.argv[2:])
