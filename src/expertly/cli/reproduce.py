"""`expertly lab reproduce`: run the papers' experiments, and compare with what the papers found."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.arguments import names, seed
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
        "fmoe, moe-infinity, promoe, moepic, expertly (ours) or one of your own (docs/extending.md); one figure or "
        "table of one (moepic:table-1); or all; several with commas between them",
        metavar="PAPER[:FIGURE]",
    )
    trace: list[Path] | None = path_option(
        None,
        "a trace made by `expertly lab trace record --full`, or imported routing; may be given several times",
        "DIR",
        is_several=True,
    )
    system: str | None = option(
        None,
        "systems of yours beside the paper's, in the tables of comparisons: no claim counts them",
        metavar="A,B",
        panel=ADVANCED,
    )
    hardware: str | None = option(
        None, "a shipped profile or a TOML file, instead of the paper's machine", metavar="NAME", panel=ADVANCED
    )
    memory: str | None = option(
        None,
        "a share of the experts or an amount, instead of the one budget of an experiment",
        metavar="SIZE",
        panel=ADVANCED,
    )
    predictor: list[Path] | None = path_option(
        None,
        "trained weights, for ProMoE or a predictor of yours; may be given several times",
        is_several=True,
        panel=ADVANCED,
    )
    fewer: list[str] | None = option(
        None,
        "experiments that simulate another number of tokens; may be given several times",
        metavar="N:A,B",
        panel=ADVANCED,
        is_several=True,
    )
    list: bool = option(False, "list the experiments and what they need, and do nothing else")
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
    from expertly.lab.papers.runs import Asked

    if args.list:
        if args.paper is not None:
            raise ConfigError(f"paper={args.paper!r}: --list lists all of them; give one of the two")
        _list(args.json)
        return 0
    if args.paper is None:
        raise ConfigError("paper: which? PAPER, PAPER:FIGURE or all; `expertly lab reproduce --list` names them")
    experiments = runner.select(args.paper)
    asked = Asked(() if args.system is None else tuple(names("system", args.system)), args.hardware, args.memory)
    asked.check(experiments)
    _check_out(args.out)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="expertly-") as scratch, progress_bar(unit="row") as progress:
        session = runner.Session(
            args.trace,
            Path(scratch),
            asked=asked,
            quick=args.quick,
            seed=args.seed,
            seeds=args.seeds,
            tokens=args.tokens,
            fewer=_fewer(args.fewer or ()),
            predictors=args.predictor or (),
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


def _fewer(given: Sequence[str]) -> dict[str, int]:
    """Tokens by the name of the experiment."""
    from expertly.lab.papers.runner import select

    found: dict[str, int] = {}
    for text in given:
        num, _, which = text.partition(":")
        if not (num.isascii() and num.isdecimal() and 0 < int(num) < 10**9):
            raise ConfigError(f"fewer={text!r:.80}: must be a number of tokens and experiments: 1500:fmoe:4,promoe:13")
        found |= {one.name: int(num) for one in select(which)}
    return found


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
