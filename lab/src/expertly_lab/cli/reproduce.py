"""`expertly lab reproduce`: run the papers' experiments, and compare with what the papers found."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from expertly.cli.output import message, print_json, progress_bar, table
from expertly.core.errors import ConfigError
from expertly.core.files import write_atomic
from expertly_lab.papers.settings import ReproduceOptions

if TYPE_CHECKING:
    from expertly_lab.papers.runner import Result, Session


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
    with tempfile.TemporaryDirectory(prefix="expertly-") as scratch, progress_bar("rows") as progress:
        session = runner.Session(args, Path(scratch), progress, message)
        for result in session.results(chosen, args.jobs):
            results.append(result)
            if not args.json:
                print(page.text(result, table), flush=True)
        if args.out is not None:
            _write(args, session, results)
        if args.json:
            print_json(page.facts(session, results))
    return 0


def _write(args: ReproduceOptions, session: Session, results: Sequence[Result]) -> None:
    from expertly_lab.papers import page

    assert args.out is not None
    files = page.pages(session, _command(args), results)
    files["results.json"] = json.dumps(page.facts(session, results), indent=1) + "\n"
    try:
        for name, text in files.items():
            path = args.out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text.encode())
    except OSError as error:
        raise ConfigError(f"out={str(args.out)!r}: cannot be written ({error.strerror or error})") from None


def _command(args: ReproduceOptions) -> str:
    """What was typed, with files by their last names and without options that change no result."""
    words = ["expertly", "lab", "reproduce", str(args.paper)]
    words += [word for path in args.trace or () for word in ("--trace", path.resolve().name)]
    words += [word for path in args.predictor or () for word in ("--predictor", path.name)]
    words += ["--arrivals", args.arrivals.name] if args.arrivals else []
    words += ["--quick"] * args.quick
    words += ["--tokens", str(args.tokens)] if args.tokens else []
    words += ["--seed", str(args.seed)] if args.seed else []
    return shlex.join([*words, "--out", str(args.out if not args.out or not args.out.is_absolute() else args.out.name)])


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
