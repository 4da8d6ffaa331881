"""`expertly lab reproduce`: the papers' experiments, and what is found here."""

from __future__ import annotations

import hashlib
import json
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import seed
from expertly.cli.output import message, print_json, progress_bar, table
from expertly.core.errors import ConfigError
from expertly.options import argument, json_flag, option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from expertly.reproduce.experiment import Experiment
    from expertly.reproduce.finding import Finding, Result
    from expertly.reproduce.subject import Subject

RESULTS = "results"


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    paper: str | None = argument(
        None,
        "fmoe, moe-infinity, promoe, moepic, one figure or table of one (moepic:table-1), or all; several with "
        "commas between them",
        metavar="PAPER[:FIGURE]",
    )
    trace: list[Path] | None = option(
        None,
        "a trace made by `expertly lab trace record --full`, or imported routing; may be given several times",
        metavar="DIR",
        type=Path,
        is_several=True,
    )
    list: bool = option(False, "list the experiments and what they need, and do nothing else")
    predictor: Path | None = option(None, "trained weights for ProMoE", metavar="FILE", type=Path)
    arrivals: Path | None = option(None, "CSV of arrivals and lengths, for fmoe:10", metavar="FILE", type=Path)
    quick: bool = option(False, "few tokens: under a minute an experiment, and noisier")
    seed: Any = option(0, "of which requests are learned from", metavar="N", type=seed)
    out: Path | None = option(
        None, "FILE.md: the page of results; else a folder for it and results.json", metavar="FILE", type=Path
    )
    reuse: Path | None = option(
        None,
        "results.json of an earlier run with the same traces and settings: what is in it is not run again",
        metavar="FILE",
        type=Path,
    )
    json: bool = json_flag()


def run(args: ReproduceOptions) -> int:
    from expertly.reproduce.registry import EXPERIMENTS, select
    from expertly.reproduce.session import Session
    from expertly.sim.schedule import read_arrivals

    if args.list:
        if args.paper is not None:
            raise ConfigError(f"paper={args.paper!r}: --list lists all of them; give one of the two")
        _list(list(EXPERIMENTS.values()), args.json)
        return 0
    if args.paper is None:
        raise ConfigError("paper: which? PAPER, PAPER:FIGURE or all; `expertly lab reproduce --list` names them")
    experiments = select(args.paper)
    _check_out(args.out)
    arrivals = None if args.arrivals is None else read_arrivals(args.arrivals)
    subjects = _subjects(args)
    settings = _settings(args, subjects)
    earlier = {} if args.reuse is None else _earlier(args.reuse, settings)
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="expertly-") as scratch, progress_bar(unit="row") as progress:
        session = Session(subjects, Path(scratch), args.quick, args.seed, arrivals, progress, earlier)
        for experiment, result in zip(experiments, session.results(experiments), strict=True):
            results[experiment.name] = result
            if not args.json:
                _print(experiment, result)
            _write(args, settings, subjects, experiments, results)
    if args.json:
        print_json(_facts(settings, experiments, results))
    return 0


def _subjects(args: ReproduceOptions) -> list[Subject]:
    """Full traces first; without --trace one of the demo model, recorded now or before."""
    from expertly.reproduce.subject import Subject

    paths = args.trace
    if paths is None:
        from expertly.cli.reproduce_trace import demo_trace

        paths = [demo_trace(args.quick)]
    subjects = [Subject.open(path, args.predictor) for path in paths]
    names = [subject.name for subject in subjects]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"trace: two of the name {twice[0]!r}; rename a folder, results are told apart by it")
    return sorted(subjects, key=lambda subject: not subject.is_full)


def _settings(args: ReproduceOptions, subjects: Sequence[Subject]) -> dict[str, Any]:
    """What results depend on, beside the code."""
    from expertly import __version__

    return {
        "version": __version__,
        "traces": {subject.name: subject.trace.fingerprint for subject in subjects},
        "predictor": _digest(args.predictor),
        "arrivals": _digest(args.arrivals),
        "quick": args.quick,
        "seed": args.seed,
    }


def _digest(path: Path | None) -> str | None:
    """Of what a file holds, which has been read before."""
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def _earlier(path: Path, settings: Mapping[str, Any]) -> dict[str, Result]:
    from expertly.reproduce.finding import Result

    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        found = {key: given["settings"][key] for key in settings}
        results = [Result.of_dict(one) for one in given["results"]]
    except OSError as error:
        raise ConfigError(f"reuse={str(path)!r}: cannot be read ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"reuse={str(path)!r}: not what `expertly lab reproduce --out DIR` writes") from None
    for key, value in settings.items():
        if found[key] != value:
            raise ConfigError(f"reuse={str(path)!r}: {key} was {found[key]!r:.120}, now it is {value!r:.120}")
    return {one.name: one for one in results}


def _check_out(out: Path | None) -> None:
    """Raises ConfigError before anything is run."""
    if out is None:
        return
    if out.suffix == ".md":
        if not out.absolute().parent.is_dir() or out.is_dir():
            raise ConfigError(f"out={str(out)!r}: {str(out.absolute().parent)!r} is not a folder, or it is one itself")
    elif out.exists() and not out.is_dir():
        raise ConfigError(f"out={str(out)!r}: must be a folder, or a file that ends in .md")


def _write(
    args: ReproduceOptions,
    settings: Mapping[str, Any],
    subjects: Sequence[Subject],
    experiments: Sequence[Experiment],
    results: Mapping[str, Result],
) -> None:
    """What there is so far: an interrupted run leaves it."""
    from expertly.reproduce.report import markdown

    if args.out is None:
        return
    page = args.out if args.out.suffix == ".md" else args.out / f"{RESULTS}.md"
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(
            markdown(_command(args, args.out), _about(args, subjects), experiments, results), encoding="utf-8"
        )
        if page != args.out:
            text = json.dumps(_facts(settings, experiments, results), indent=1)
            (args.out / f"{RESULTS}.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out={str(args.out)!r}: cannot be written ({error.strerror or error})") from None


def _command(args: ReproduceOptions, out: Path) -> str:
    """What was typed, but files and folders by their names alone, and without --reuse, which changes no result."""
    parts = ["expertly", "lab", "reproduce", str(args.paper)]
    if args.trace is not None:
        for trace in args.trace:
            parts += ["--trace", trace.resolve().name]
    for flag, path in (("--predictor", args.predictor), ("--arrivals", args.arrivals)):
        parts += [flag, path.name] if path is not None else []
    parts += ["--quick"] * args.quick + (["--seed", str(args.seed)] if args.seed else [])
    return shlex.join([*parts, "--out", out.name if out.is_absolute() else str(out)])


def _about(args: ReproduceOptions, subjects: Sequence[Subject]) -> list[str]:
    """The traces, in words."""
    lines = []
    for one in subjects:
        manifest = one.trace.manifest
        kind = "full" if one.is_full else "chosen experts and their weights"
        shape = (
            f"{len(manifest.layers)} layers of {manifest.layers[0].num_experts} experts, top-{manifest.layers[0].top_k}"
        )
        num = sum(1 for request in one.trace.requests if request.num_rows)
        lines.append(
            f"`{one.name}`: {manifest.model}, {shape}; {num} requests, {one.trace.num_rows} tokens; {kind}; {one.sizes}"
            + (f"; {one.weights_note}" if one.weights_note else "")
        )
    lines.append(
        "70 % of the requests are there to learn from (`--split 7:3`), and as many of their tokens are as eight times "
        "those simulated; these are of the rest, from an empty cache. Hit rates are of decode "
        "([conventions](conventions.md)). Where a trace lacks what a system predicts from, its prediction is modelled, "
        "right as often as ProMoE (section 4) found skip prediction to be, and labelled so."
    )
    if args.quick:
        lines.append("`--quick`: few tokens, so that small differences mean little.")
    return lines


def _facts(
    settings: Mapping[str, Any], experiments: Sequence[Experiment], results: Mapping[str, Result]
) -> dict[str, Any]:
    known = {
        one.name: {"paper": one.paper, "figures": list(one.figures), "title": one.title, "shows": one.shows}
        for one in experiments
    }
    return {"settings": settings, "results": [known[name] | one.as_dict() for name, one in results.items()]}


def _print(experiment: Experiment, result: Result) -> None:
    lines = [f"{experiment.name}  {experiment.title} ({experiment.where})", f"the paper: {experiment.shows}"]
    for finding in result.findings:
        lines += _finding(finding)
    lines += [f"not run on {reason}" for reason in result.left_out]
    print("\n".join([*lines, f"direction: {result.verdict} ({result.seconds:.0f} s)", ""]), flush=True)


def _finding(finding: Finding) -> list[str]:
    lines = ["", f"{finding.trace}: {finding.setting}"]
    if finding.measured_on:
        lines.append(f"measured on {finding.measured_on}")
    for one in finding.tables:
        lines += ["", one.title, table(one.headers, one.shown())]
    lines.append("")
    for check in finding.checks:
        lines.append(f"[{'holds' if check.holds else 'does not hold'}] {check.claim}: {check.measured}")
        lines += [f"    why: {check.why}"] * bool(check.why)
    return [*lines, *(f"note: {note}" for note in finding.notes)]


def _list(experiments: Sequence[Experiment], is_json: bool) -> None:
    rows = [(one.name, one.where, one.title, _needs(one)) for one in experiments]
    if is_json:
        names = ("name", "where", "title", "needs")
        print_json({"experiments": [dict(zip(names, row, strict=True)) for row in rows]})
        return
    print(table(("experiment", "in the paper", "what", "needs"), rows))
    message("every one of them runs on what the demo model routes; --trace takes other traces")


def _needs(one: Experiment) -> str:
    what = ", ".join(one.needs) or "any trace"
    return what + (", a quiet machine" if one.is_timed else "")
