"""`expertly lab reproduce`: run the papers' experiments, and compare with what the papers found."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from expertly.cli.output import message, print_json, progress_bar, table
from expertly.core.errors import ConfigError
from expertly.core.files import write_atomic
from expertly_lab.cli.output import commit, machine
from expertly_lab.papers.settings import ReproduceOptions

if TYPE_CHECKING:
    from expertly_lab.papers.runner import Result


def run(args: ReproduceOptions) -> int:
    from expertly_lab.papers import page, runner

    if args.list:
        if args.paper is not None:
            raise ConfigError(f"paper={args.paper!r}: --list lists all of them; give one of the two")
        _list(args.json)
        return 0
    if args.paper is None:
        raise ConfigError("paper: which? PAPER, PAPER:FIGURE or all; `expertly lab reproduce --list` names them")
    chosen = runner.select(args.paper)
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise ConfigError(f"out={str(args.out)!r}: not a folder; accepted: a folder, or a path where none is yet")
    results: list[Result] = []
    with progress_bar("rows") as progress:
        session = runner.Session(args, progress, message)
        for result in session.results(chosen, args.jobs):
            results.append(result)
            if not args.json:
                print(page.text(result, table), flush=True)
        origin = {"command": _command(args), "commit": commit(), "machine": machine()}
        facts = page.facts(session, origin, results)
        if args.out is not None:
            _write(
                args.out, page.pages(session, origin, results) | {"results.json": json.dumps(facts, indent=1) + "\n"}
            )
        if args.json:
            print_json(facts)
    return 0


def _write(out: Path, files: Mapping[str, str]) -> None:
    try:
        for name, text in files.items():
            path = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text.encode())
    except OSError as error:
        raise ConfigError(f"out={str(out)!r}: cannot be written ({error.strerror or error})") from None


def _command(args: ReproduceOptions) -> str:
    """What was typed, with files by their last names and without options that change no result."""
    words = ["expertly", "lab", "reproduce", str(args.paper)]
    words += [word for path in args.trace or () for word in ("--trace", path.resolve().name)]
    words += [word for path in args.predictor or () for word in ("--predictor", path.name)]
    words += ["--arrivals", args.arrivals.name] if args.arrivals else []
    words += ["--quick"] * args.quick
    words += ["--tokens", str(args.tokens)] if args.tokens else []
    words += ["--seed", str(args.seed)] if args.seed else []
    if args.out is not None:
        words += ["--out", args.out.name if args.out.is_absolute() else str(args.out)]
    return shlex.join(words)


def _list(is_json: bool) -> None:
    from expertly_lab.papers.runner import PAPERS, experiments

    for problem in PAPERS.problems():
        message(f"expertly: note: {problem}")
    rows = [
        (experiment.name, experiment.title, ", ".join(experiment.needs) or "any trace") for experiment in experiments()
    ]
    if is_json:
        print_json({"experiments": [dict(zip(("name", "title", "needs"), row, strict=True)) for row in rows]})
        return
    print(table(("experiment", "what", "needs"), rows))
    message("every one of them runs on what the demo model routes; --trace takes other traces")
