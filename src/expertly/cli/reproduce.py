"""`expertly lab reproduce`: run the papers' experiments, and compare with what the papers found."""

from __future__ import annotations

import json
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import seed
from expertly.cli.output import message, print_json, progress_bar, table
from expertly.core.errors import ConfigError
from expertly.lab.papers import SEEDS, TOKENS
from expertly.options import ADVANCED, argument, json_flag, option, path_option

if TYPE_CHECKING:
    from expertly.lab.papers.findings import Result
    from expertly.lab.papers.runner import Session


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    paper: str | None = argument(
        None,
        "fmoe, moe-infinity, promoe, moepic, one figure or table of one (moepic:table-1), or all; several with "
        "commas between them",
        metavar="PAPER[:FIGURE]",
    )
    trace: list[Path] | None = path_option(
        None,
        "a trace made by `expertly lab trace record --full`, or imported routing; may be given several times",
        "DIR",
        is_several=True,
    )
    list: bool = option(False, "list the experiments and what they need, and do nothing else")
    predictor: Path | None = path_option(None, "trained weights for ProMoE", panel=ADVANCED)
    arrivals: Path | None = path_option(None, "CSV of arrivals and lengths, for fmoe:10", panel=ADVANCED)
    quick: bool = option(False, "few tokens and one seed: under a minute an experiment, with wide intervals")
    tokens: int = option(
        TOKENS, "decoded tokens of a trace that are simulated, over all seeds", least=1, panel=ADVANCED
    )
    seeds: int = option(SEEDS, "how many seeds; each learns from other requests", least=1, panel=ADVANCED)
    seed: Any = option(0, "the first seed", metavar="N", type=seed, panel=ADVANCED)
    jobs: int = option(1, "how many experiments run at once, each in its own process", least=1)
    out: Path | None = path_option(None, "FILE.md for the page of results, or a folder for it and results.json")
    reuse: Path | None = path_option(
        None, "results.json of an earlier run with the same traces and settings: what is in it is not run again"
    )
    json: bool = json_flag()


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
    _check_out(args.out)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="expertly-") as scratch, progress_bar(unit="row") as progress:
        session = runner.Session(
            args.trace,
            Path(scratch),
            quick=args.quick,
            seed=args.seed,
            seeds=args.seeds,
            tokens=args.tokens,
            predictor=args.predictor,
            arrivals=args.arrivals,
            progress=progress,
            say=message,
        )
        earlier = {} if args.reuse is None else session.earlier(args.reuse)
        found = session.results([one for one in experiments if one.name not in earlier], args.jobs)
        for experiment in experiments:
            results.append(earlier.get(experiment.name) or next(found))
            if not args.json:
                print(runner.text(results[-1], table), flush=True)
            _write(args, session, results)
    if args.json:
        print_json(session.facts(results))
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
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(markdown(_command(args), session.about(), results), encoding="utf-8")
        if page != args.out:
            text = json.dumps(session.facts(results), indent=1)
            (args.out / "results.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out={str(args.out)!r}: cannot be written ({error.strerror or error})") from None


def _command(args: ReproduceOptions) -> str:
    """What was typed, with files and folders by their last names and without --reuse, which changes no result."""
    assert args.out is not None
    parts = ["expertly", "lab", "reproduce", str(args.paper)]
    for path in args.trace or []:
        parts += ["--trace", path.resolve().name]
    for flag, file in (("--predictor", args.predictor), ("--arrivals", args.arrivals)):
        parts += [flag, file.name] if file is not None else []
    parts += ["--quick"] * args.quick
    for name, default in (("tokens", TOKENS), ("seeds", SEEDS), ("seed", 0)):
        value = getattr(args, name)
        parts += [f"--{name}", str(value)] if value != default else []
    return shlex.join([*parts, "--out", args.out.name if args.out.is_absolute() else str(args.out)])


def _list(is_json: bool) -> None:
    from expertly.lab.papers.runner import EXPERIMENTS

    rows = []
    for one in EXPERIMENTS.values():
        needs = ", ".join(one.needs) or "any trace"
        rows.append((one.name, one.where, one.title, needs + (", a quiet machine" if one.is_timed else "")))
    names = ("name", "where", "title", "needs")
    if is_json:
        print_json({"experiments": [dict(zip(names, row, strict=True)) for row in rows]})
        return
    print(table(("experiment", "in the paper", "what", "needs"), rows))
    message("every one of them runs on what the demo model routes; --trace takes other traces")
