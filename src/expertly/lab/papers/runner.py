"""Runs experiments on traces, and the one report of what they find: text for a terminal, a page, JSON."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

import expertly
from expertly.core.errors import ConfigError, ExpertlyError
from expertly.core.geometry import Geometry
from expertly.core.processes import as_finished
from expertly.core.resources import granted_cpus, parse_memory
from expertly.core.units import counted
from expertly.lab.papers import fmoe, moe_infinity, moepic, ours, promoe, recorded
from expertly.lab.papers.findings import TAKEN, Experiment, Finding, Paper, Result
from expertly.lab.papers.runs import LEARNED_TOKENS, Lab, Subject
from expertly.lab.papers.settings import ReproduceOptions
from expertly.policies.predictor import PREDICTORS
from expertly.policies.registry import Registry
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import HARDWARE_NAMES, Hardware
from expertly.sim.schedule import read_arrivals
from expertly.sim.study import Memory

_Part = tuple[Finding | str, float]
"""What an experiment found on one trace, or why nothing; and its seconds."""

PAPERS: Registry[Paper] = Registry(
    "paper",
    "expertly.papers",
    {one.name: one for one in (fmoe.PAPER, moe_infinity.PAPER, promoe.PAPER, moepic.PAPER, ours.PAPER)},
    lambda one: isinstance(one, Paper),
    "a Paper",
    adopt=Paper.called,
)
ALL = "all"
COMMANDS = {
    "prompts": "`expertly lab trace record` records them; imported routing has none",
    "weights": "`expertly lab train TRACE --out FILE` makes them, --predictor FILE takes them",
}
RECORD = "`expertly lab trace record --full` records it"
REMOVED = {
    "fmoe:link": "expertly:assumptions varies the link of six systems",
    "fmoe:start": "fmoe:10 begins with empty stores",
}
"""Experiments that no paper has, and what to run instead."""


def experiments() -> list[Experiment]:
    """Those that ship, then those of installed packages."""
    return [one for paper in PAPERS.values() for one in paper.experiments]


def find_experiment(name: str) -> Experiment:
    """By the name that it has itself."""
    return next(one for one in PAPERS[name.partition(":")[0]].experiments if one.name == name)


def select(names: str) -> list[Experiment]:
    """Those of `all`, `PAPER` or `PAPER:FIGURE`, several with commas between them, in the order of the papers that
    ship; others come behind. A paper is one of PAPERS, or the dotted path of one.

    Raises ConfigError naming what is accepted.
    """
    chosen: dict[str, Experiment] = {}
    for name in names.split(","):
        name = name.strip()
        paper, colon, figure = name.partition(":")
        if name in REMOVED:
            raise ConfigError(f"figure={figure!r}: no experiment any more; use instead: {REMOVED[name]}")
        if name != ALL and paper not in PAPERS:
            accepted = ", ".join((ALL, *PAPERS, *(f"{paper}:FIGURE" for paper in PAPERS)))
            raise ConfigError(f"paper={name!r:.80}: unknown; accepted: {accepted}, or the dotted path of a Paper")
        own = experiments() if name == ALL else PAPERS[paper].experiments
        found = [one for one in own if not colon or figure in one.figures]
        if not found:
            accepted = ", ".join(figure for one in own for figure in one.figures)
            raise ConfigError(f"figure={figure!r:.80}: none of {paper}'s; accepted: {accepted}")
        chosen |= {one.name: one for one in found}
    order = [one.name for paper in PAPERS.built_in.values() for one in paper.experiments]
    return sorted(chosen.values(), key=lambda one: order.index(one.name) if one.name in order else len(order))


def refused(options: ReproduceOptions, experiment: Experiment) -> list[str]:
    """Of TAKEN, what a user asks for and an experiment does not take."""
    return [name for name in TAKEN if getattr(options, name) and name not in experiment.takes]


def check_asked(options: ReproduceOptions, experiments: Sequence[Experiment]) -> None:
    """Raises ConfigError for what there is not, and where none of these experiments takes what is asked for."""
    for name in options.systems:
        get_system(name)
    if options.hardware is not None:
        Hardware.read(options.hardware)
    if options.memory is not None:
        parse_memory(options.memory, 1 << 60)  # of any model
    if all(refused(options, one) for one in experiments):
        named = ", ".join(one.name for one in experiments)
        raise ConfigError(
            f"{', '.join(refused(options, experiments[0]))}: means nothing to {named:.200}; `expertly lab reproduce "
            "--list` says what each experiment takes"
        )


def _fewer(given: Sequence[str]) -> dict[str, int]:
    """Tokens by the name of the experiment."""
    found: dict[str, int] = {}
    for text in given:
        num, _, which = text.partition(":")
        if not (num.isascii() and num.isdecimal() and 0 < int(num) < 10**9):
            raise ConfigError(f"fewer={text!r:.80}: must be a number of tokens and experiments: 1500:fmoe:4,promoe:13")
        found |= {one.name: int(num) for one in select(which)}
    return found


class Session:
    """Experiments on the same traces with the same settings; runs that they share are made once. Without a trace the
    demo model answers some prompts, recorded at the first call. Results depend on `settings`, and on the code. Raises
    ConfigError and what `Subject.open` does.
    """

    def __init__(
        self,
        options: ReproduceOptions,
        scratch: Path,
        progress: Callable[[str, int, int], None] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._options, self._scratch, self._progress, self._say = options, scratch, progress, say
        self._fewer = _fewer(options.fewer or ())
        self._arrivals = None if options.arrivals is None else read_arrivals(options.arrivals)
        predictors = options.predictor or ()
        named = [get_system(name).weights for name in options.systems]
        named += [one.weights for one in PREDICTORS.values()]
        named += [kind for one in (select(options.paper) if options.paper else ()) for kind in one.weights]
        kinds = [kind for kind in named if kind is not None]
        paths = options.trace or [recorded.demo_trace(options.quick, say)]
        subjects = [Subject.open(path, predictors, kinds) for path in paths]
        names = [subject.name for subject in subjects]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ConfigError(f"trace: two of the name {twice[0]!r}; rename a folder, results are told apart by it")
        self.subjects = sorted(subjects, key=lambda subject: not subject.is_full)
        machine, memory = options.hardware, options.memory
        if memory is not None:
            for subject in subjects:
                Memory(memory).budget(Geometry(subject.layers))
        self.settings = {
            "version": f"{expertly.__version__}, source {_source_digest()[:16]}",
            "traces": {subject.name: subject.trace.fingerprint for subject in self.subjects},
            "predictor": " ".join(map(_digest, predictors)) or None,
            "arrivals": None if options.arrivals is None else _digest(options.arrivals),
            "quick": options.quick,
            "seed": options.seed,
            "seeds": options.num_seeds,
            "tokens": options.num_tokens,
            "fewer": self._fewer or None,
            "system": list(options.systems) or None,
            "hardware": machine if machine in HARDWARE_NAMES or machine is None else _digest(Path(machine)),
            "memory": memory,
        }
        self._labs: dict[tuple[str, int], Lab] = {}

    def results(self, experiments: Sequence[Experiment], jobs: int | None = 1) -> Iterator[Result]:
        """As they are found: so many traces of experiments at once, each in a process of its own; None: as many as
        there are processors. What reads a clock runs before them, alone.
        """
        jobs = jobs or granted_cpus()
        shared = {one.name: self._traces(one) for one in experiments if not one.is_timed}
        parts = [(name, trace) for name, traces in shared.items() for trace in traces]
        if min(jobs, len(parts)) < 2:
            yield from map(self.result, experiments)
            return
        yield from (self.result(one) for one in experiments if not shared.get(one.name))
        found: dict[str, dict[str, _Part]] = {name: {} for name in shared}
        make = partial(_open_session, self._options, self._scratch)
        for number, part in as_finished(jobs, make, _part, parts, lambda part: find_experiment(part[0]).is_long):
            name, trace = parts[number]
            found[name][trace] = part
            if len(found[name]) == len(shared[name]):
                yield self._joined(find_experiment(name), found[name])

    def result(self, experiment: Experiment) -> Result:
        """On the traces that have what it needs; what cannot run on one is said."""
        return self._joined(experiment, {trace: self.part(experiment, trace) for trace in self._traces(experiment)})

    def _traces(self, experiment: Experiment) -> list[str]:
        """Those that it runs on, by name, and the routing that is made up for it."""
        if refused(self._options, experiment):
            return []
        able = [subject.name for subject in self.subjects if not subject.lacks(experiment.needs)]
        return [*able[: experiment.most], *filter(None, [experiment.stand_in])]

    def part(self, experiment: Experiment, trace: str) -> _Part:
        """Of its result, what is found on one of its traces."""
        start = time.monotonic()
        lab = self._lab_of(trace, self._fewer.get(experiment.name))
        try:
            found: Finding | str = experiment.run(lab)
        except ExpertlyError as error:
            found = f"{lab.subject.name}: {error}"
        return found, time.monotonic() - start

    def _joined(self, experiment: Experiment, parts: Mapping[str, _Part]) -> Result:
        """The result of what was found on each of its traces."""
        left_out: list[str] = []
        if not_taken := refused(self._options, experiment):
            said = ", ".join(f"--{name}" for name in not_taken)
            taken = ", ".join(f"--{name}" for name in TAKEN if name in experiment.takes) or "none of these"
            left_out.append(f"any trace: it takes no {said}; accepted: {taken}")
        else:
            for subject in self.subjects:
                if missing := subject.lacks(experiment.needs):
                    how = "; ".join(dict.fromkeys(COMMANDS.get(name, RECORD) for name in missing))
                    left_out.append(f"{subject.name}: needs {', '.join(missing)}, which it lacks ({how})")
        found = [parts[trace] for trace in self._traces(experiment)]
        left_out += [one for one, _ in found if isinstance(one, str)]
        findings = tuple(one for one, _ in found if not isinstance(one, str))
        return Result(experiment.name, findings, tuple(left_out), sum(seconds for _, seconds in found))

    def lab(self, subject: Subject, tokens: int | None = None) -> Lab:
        options = self._options if tokens is None else replace(self._options, tokens=tokens)
        key = subject.name, options.num_tokens
        if key not in self._labs:
            scratch = self._scratch / str(len(self._labs))
            scratch.mkdir(parents=True)
            self._labs[key] = Lab(subject, scratch, options, self._arrivals, self._progress)
        return self._labs[key]

    def _lab_of(self, name: str, tokens: int | None) -> Lab:
        """Of a trace, or of routing that is made up once."""
        known = [*self.subjects, *(lab.subject for lab in self._labs.values())]
        subject = next((one for one in known if one.name == name), None)
        if subject is None:
            self._scratch.mkdir(parents=True, exist_ok=True)
            if name == recorded.SWITCH:
                subject = recorded.switch(self._options.seed, self._say)
            else:
                subject = moepic.made_up(name, self._scratch / "made up", self._options.seed)
        return self.lab(subject, tokens)

    def earlier(self, path: Path) -> dict[str, Result]:
        """Results that `facts` wrote to a file, by experiment. Raises ConfigError where it is no such file, or one of
        other settings.
        """
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            found = {key: given["settings"].get(key) for key in self.settings}
            results = [Result.of_dict(one) for one in given["results"]]
        except OSError as error:
            raise ConfigError(f"reuse={str(path)!r}: cannot be read ({error.strerror or error})") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"reuse={str(path)!r}: not what `expertly lab reproduce --out DIR` writes") from None
        for key, value in self.settings.items():
            if found[key] != value:
                raise ConfigError(f"reuse={str(path)!r}: {key} was {found[key]!r:.120}, now it is {value!r:.120}")
        return {one.name: one for one in results}

    def facts(self, results: Sequence[Result]) -> dict[str, Any]:
        """Settings and results, for JSON."""
        found = []
        for result in results:
            one = find_experiment(result.name)
            about = {"paper": one.paper, "figures": list(one.figures), "title": one.title, "shows": one.shows}
            found.append(about | result.as_dict())
        return {"settings": self.settings, "results": found}

    def about(self) -> list[str]:
        """The traces, in words."""
        lines = []
        for one in self.subjects:
            manifest = one.trace.manifest
            kind = "full" if one.is_full else "chosen experts and their weights"
            first = manifest.layers[0]
            shape = f"{len(manifest.layers)} layers of {first.num_experts} experts, top-{first.top_k}"
            num = sum(1 for request in one.trace.requests if request.num_rows)
            said = f"`{one.name}`: {manifest.model}, {shape}; {num} requests, {one.trace.num_rows} tokens; {kind}"
            how = f"`{manifest.command}`" if manifest.command else ""
            lines.append("; ".join(filter(None, (said, one.sizes, one.weights_note, how))))
        lines.append(
            f"{self._options.num_tokens} decoded tokens are simulated{self._said_of_fewer()}, or all that there are, "
            f"over {counted(self._options.num_seeds, 'seed')}. Each parts the requests anew: 70 % are to learn from "
            f"(`--split 7:3`), of which {LEARNED_TOKENS} tokens are, or 120 requests if that is more; those simulated "
            "are of the rest, from an empty cache. Where trained networks learned from this trace, seeds order its two "
            "parts anew. Hit rates are of decode ([conventions](conventions.md)). Where a trace lacks what a system "
            "predicts from, its prediction is modelled, right as often as ProMoE (section 4) found skip prediction to "
            "be, and labelled so."
        )
        return lines + ["`--quick`: little is learned from, so that little can be told."] * self._options.quick

    def _said_of_fewer(self) -> str:
        by_num: dict[int, list[str]] = {}
        for name, num in self._fewer.items():
            by_num.setdefault(num, []).append(f"`{name}`")
        return "".join(f" ({num} of {', '.join(names)})" for num, names in by_num.items())


def _open_session(options: ReproduceOptions, scratch: Path) -> Session:
    folder = scratch / str(os.getpid())
    folder.mkdir()
    return Session(options, folder)


def _part(session: Session, part: tuple[str, str]) -> _Part:
    name, trace = part
    return session.part(find_experiment(name), trace)


def _source_digest() -> str:
    """Of this package's code and hardware profiles: others may find other results."""
    digest, folder = hashlib.sha256(), Path(expertly.__file__).parent
    for pattern in ("*.py", "*.so", "*.toml"):
        for path in sorted(folder.rglob(pattern)):
            digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _digest(path: Path) -> str:
    """Of what a file holds, which has been read before."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- the report --------------------------------------------------------------------------------------------------

Grid = Callable[[Sequence[str], Sequence[Sequence[str]]], str]


def markdown(name: str, command: str, about: Sequence[str], results: Sequence[Result]) -> dict[str, str]:
    """Pages by their names: verdicts as `name`.md, and `name`/PAPER.md for each paper's tables and rules."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("expertly.lab.papers", ""),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["row"] = lambda cells: "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    pairs: dict[str, list[tuple[Experiment, Result]]] = {}
    for result in results:
        one = find_experiment(result.name)
        pairs.setdefault(one.paper, []).append((one, result))
    known: dict[str, Any] = {
        "name": name,
        "command": command,
        "about": about,
        "results": results,
        "papers": [(paper, PAPERS[paper].title, found) for paper, found in pairs.items()],
        "count": lambda of, verdict=None: sum(one.count(verdict) for one in of),
    }
    pages = {f"{name}.md": environment.get_template("verdicts.md.jinja").render(known)}
    details = environment.get_template("details.md.jinja")
    for paper, title, found in known["papers"]:
        pages[f"{name}/{paper}.md"] = details.render(known, title=title, pairs=found)
    return {page: text.rstrip() + "\n" for page, text in pages.items()}


def text(result: Result, grid: Grid) -> str:
    """For a terminal; `grid` lays out a table of headers and rows."""
    one = find_experiment(result.name)
    lines = [f"{one.name}  {one.title} ({one.where})", f"the paper: {one.shows}"]
    for finding in result.findings:
        lines += ["", f"{finding.trace}: {finding.setting}"]
        lines += [f"measured on {finding.measured_on}"] * bool(finding.measured_on)
        for table in finding.tables:
            lines += ["", table.title, grid(table.headers, table.shown())]
        lines.append("")
        for check in finding.checks:
            lines += [
                f"[{check.verdict}]{' (modelled)' * check.is_modelled} {check.claim}: {check.measured}"
                + (f"; in the paper {check.paper}" if check.paper else ""),
                *[f"    why: {check.why}"] * bool(check.why),
            ]
        lines += [f"note: {note}" for note in finding.notes]
    lines += [f"not run on {reason}" for reason in result.left_out]
    return "\n".join([*lines, f"direction: {result.verdict} ({result.seconds:.0f} s)", ""])
