"""`expertly lab reproduce`: run the papers' experiments, and compare with what the papers found."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from expertly.cli.output import message, print_json, progress_bar, table
from expertly.core.errors import ConfigError
from expertly.core.files import write_atomic
from expertly.lab.papers.settings import ReproduceOptions

if TYPE_CHECKING:
    from expertly.lab.papers.findings import Result
    from expertly.lab.papers.runner import Session


def run(args: ReproduceOptions) -> int:
    from expertly.lab.papers import runner

    if args.list:
        if args.paper is not None:
            raise ConfigError(f"paper={args.paper!r}: --list lists all of them; give one of the two")
        _list(args.json)
        return 0
    if args.paper is None:
        raise ConfigError("paper: which? PAPER, PAPER:FIGURE or all; `expertly lab reproduce --list` names them")
    experiments = runner.select(args.paper)
    runner.check_asked(args, experiments)
    _check_out(args.out)
    with tempfile.TemporaryDirectory(prefix="expertly-") as scratch, progress_bar("rows") as progress:
        session = runner.Session(args, Path(scratch), progress, message)
        earlier = {} if args.reuse is None else session.earlier(args.reuse)
        found = {one.name: earlier[one.name] for one in experiments if one.name in earlier}
        new = session.results([one for one in experiments if one.name not in found], args.jobs)
        for result in chain([*found.values()], new):
            found[result.name] = result
            if not args.json:
                print(runner.text(result, table), flush=True)
            _write(args, session, [found[one.name] for one in experiments if one.name in found])
    if args.json:
        print_json(session.facts([found[one.name] for one in experiments]))
    return 0


def _check_out(out: Path | None) -> None:
    """Raises ConfigError before anything is run."""
    if out is None:
        return
    if out.suffix == ".md":
        if not out.absolute().parent.is_dir() or out.is_dir():
            raise ConfigError(f"out={str(out)!r}: {str(out.absolute().parent)!r} is not a folder, or it is one itself")
    elif out.exists() and not out.is_dir():
        raise ConfigError(f"out={str(out)!r}: must be a folder, or a file that ends in .md")


def _write(args: ReproduceOptions, session: Session, results: list[Result]) -> None:
    """Write the results so far, so that an interrupted run leaves them."""
    from expertly.lab.papers.runner import markdown

    if args.out is None:
        return
    page = args.out if args.out.suffix == ".md" else args.out / "results.md"
    try:
        for name, text in markdown(page.stem, _command(args), session.about(), results).items():
            path = page.parent / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text.encode())
        if page != args.out:
            text = json.dumps(session.facts(results), indent=1)
            write_atomic(args.out / "results.json", (text + "\n").encode())
    except OSError as error:
        raise ConfigError(f"out={str(args.out)!r}: cannot be written ({error.strerror or error})") from None


def _command(args: ReproduceOptions) -> str:
    """What was typed, with files and folders by their last names and without options that change no result."""
    assert args.out is not None
    parts = ["expertly", "lab", "reproduce", str(args.paper)]
    for option_of in fields(args):
        name, value = option_of.name, getattr(args, option_of.name)
        if name in ("paper", "list", "jobs", "out", "reuse", "json") or value == option_of.default:
            continue
        for one in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            is_file = isinstance(one, Path) or name == "hardware"
            parts += [f"--{name}"] if one is True else [f"--{name}", Path(one).resolve().name if is_file else str(one)]
    return shlex.join([*parts, "--out", args.out.name if args.out.is_absolute() else str(args.out)])


def _list(is_json: bool) -> None:
    from expertly.lab.papers.runner import PAPERS, experiments

    for problem in PAPERS.problems():
        message(f"expertly: note: {problem}")
    rows = []
    for one in experiments():
        needs = (", ".join(one.needs) or "any trace") + (", a quiet machine" if one.is_timed else "")
        rows.append((one.name, one.where, one.title, needs, " ".join(f"--{name}" for name in one.takes)))
    keys = ("name", "where", "title", "needs", "takes")
    if is_json:
        print_json({"experiments": [dict(zip(keys, row, strict=True)) for row in rows]})
        return
    print(table(("experiment", "in the paper", "what", "needs", "takes"), rows))
    message("every one of them runs on what the demo model routes; --trace takes other traces")
