"""Runs experiments on traces, and the one report of what they find: text for a terminal, a page, JSON."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jinja2

from expertly import __version__
from expertly.core.errors import ConfigError, ExpertlyError
from expertly.lab.papers import SEEDS, TOKENS, fmoe, moe_infinity, moepic, ours, promoe
from expertly.lab.papers.findings import Experiment, Finding, Result
from expertly.lab.papers.runs import LEARNED_TOKENS, Lab, Subject
from expertly.sim.schedule import read_arrivals
from expertly.store.cache import cache_folder

PAPERS = {
    "fmoe": "fMoE: Taming Latency-Memory Trade-Off in MoE-Based LLM Serving",
    "moe-infinity": "MoE-Infinity: Efficient MoE Inference on Personal Machines with Sparsity-Aware Expert Cache",
    "promoe": "ProMoE: Fast MoE-based LLM Serving using Proactive Caching",
    "moepic": "MoEpic: Accelerating Mixture-of-Expert Inference with Adaptive Expert Split Mechanism",
    "expertly": "Ours: what no paper shows",
}
EXPERIMENTS: dict[str, Experiment] = {
    one.name: one
    for paper in (fmoe, moe_infinity, promoe, moepic, ours)
    for one in vars(paper).values()
    if isinstance(one, Experiment)
}
ALL = "all"
COMMANDS = {
    "prompts": "`expertly lab trace record` records them; imported routing has none",
    "weights": "`expertly lab train TRACE --out FILE` makes them, --predictor FILE takes them",
}
RECORD = "`expertly lab trace record --full` records it"


def select(names: str) -> list[Experiment]:
    """Those of `all`, `PAPER` or `PAPER:FIGURE`, several with commas between them, in the order of EXPERIMENTS.

    Raises ConfigError naming what is accepted.
    """
    chosen: set[str] = set()
    for name in names.split(","):
        name = name.strip()
        paper, colon, figure = name.partition(":")
        if name != ALL and paper not in PAPERS:
            accepted = ", ".join((ALL, *PAPERS, *(f"{paper}:FIGURE" for paper in PAPERS)))
            raise ConfigError(f"paper={name!r:.80}: unknown; accepted: {accepted}")
        own = [one for one in EXPERIMENTS.values() if name == ALL or one.paper == paper]
        found = [one for one in own if not colon or figure in one.figures]
        if not found:
            accepted = ", ".join(figure for one in own for figure in one.figures)
            raise ConfigError(f"figure={figure!r:.80}: none of {paper}'s; accepted: {accepted}")
        chosen |= {one.name for one in found}
    return [one for name, one in EXPERIMENTS.items() if name in chosen]


class Session:
    """Experiments on the same traces with the same settings; runs that they share are made once.

    `paths`: traces; None: the demo model answers some prompts, recorded at the first call. Results depend on
    `settings`, and on the code. Raises ConfigError and what `Subject.open` does.
    """

    def __init__(
        self,
        paths: Sequence[Path] | None,
        scratch: Path,
        *,
        quick: bool = False,
        seed: int = 0,
        seeds: int = SEEDS,
        tokens: int = TOKENS,
        predictor: Path | None = None,
        arrivals: Path | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._scratch = scratch
        self._quick, self._seed = quick, seed
        self._again = partial(
            Session, paths, quick=quick, seed=seed, seeds=seeds, tokens=tokens, predictor=predictor, arrivals=arrivals
        )
        recorded = None if arrivals is None else read_arrivals(arrivals)
        self._make_lab = partial(
            Lab,
            quick=quick,
            seed=seed,
            num_seeds=seeds,
            num_tokens=tokens,
            arrivals=recorded,
            progress=progress,
        )
        subjects = [Subject.open(path, predictor) for path in (paths or [demo_trace(quick, say)])]
        names = [subject.name for subject in subjects]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ConfigError(f"trace: two of the name {twice[0]!r}; rename a folder, results are told apart by it")
        self.subjects = sorted(subjects, key=lambda subject: not subject.is_full)
        self.settings = {
            "version": __version__,
            "traces": {subject.name: subject.trace.fingerprint for subject in self.subjects},
            "predictor": _digest(predictor),
            "arrivals": _digest(arrivals),
            "quick": quick,
            "seed": seed,
            "seeds": seeds,
            "tokens": tokens,
        }
        self._labs: dict[str, Lab] = {}

    def results(self, experiments: Sequence[Experiment], jobs: int = 1) -> Iterator[Result]:
        """In order; so many at once, each in a process of its own. What reads a clock runs before them, alone."""
        if min(jobs, len(experiments)) < 2:
            yield from map(self.result, experiments)
            return
        alone = {one.name: self.result(one) for one in experiments if one.is_timed}
        context = get_context("spawn")  # threads of libraries do not survive a fork
        with ProcessPoolExecutor(jobs, context, _open_session, (self._again, self._scratch)) as pool:
            found = [None if one.name in alone else pool.submit(_result, one.name) for one in experiments]
            for one, future in zip(experiments, found, strict=True):
                yield alone[one.name] if future is None else future.result()

    def result(self, experiment: Experiment) -> Result:
        """On the traces that have what it needs; what cannot run on one is said."""
        start = time.monotonic()
        findings: list[Finding] = []
        left_out: list[str] = []
        able = []
        for subject in self.subjects:
            missing = subject.lacks(experiment.needs)
            if missing:
                how = "; ".join(dict.fromkeys(COMMANDS.get(name, RECORD) for name in missing))
                left_out.append(f"{subject.name}: needs {', '.join(missing)}, which it lacks ({how})")
            else:
                able.append(subject)
        labs = [self.lab(subject) for subject in able[: experiment.most]]
        for lab in [*labs, *([self._stand_in()] if experiment.stand_in else [])]:
            try:
                findings.append(experiment.run(lab))
            except ExpertlyError as error:
                left_out.append(f"{lab.subject.name}: {error}")
        return Result(experiment.name, tuple(findings), tuple(left_out), time.monotonic() - start)

    def lab(self, subject: Subject) -> Lab:
        if subject.name not in self._labs:
            scratch = self._scratch / str(len(self._labs))
            scratch.mkdir(parents=True)
            self._labs[subject.name] = self._make_lab(subject, scratch)
        return self._labs[subject.name]

    def _stand_in(self) -> Lab:
        known = self._labs.get(moepic.STAND_IN)
        if known is not None:
            return known
        self._scratch.mkdir(parents=True, exist_ok=True)
        return self.lab(moepic.mixtral(self._scratch / "mixtral", self._seed))

    def earlier(self, path: Path) -> dict[str, Result]:
        """Results that `facts` wrote to a file, by experiment. Raises ConfigError where it is no such file, or one of
        other settings.
        """
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            found = {key: given["settings"][key] for key in self.settings}
            results = [Result.of_dict(one) for one in given["results"]]
        except OSError as error:
            raise ConfigError(f"reuse={str(path)!r}: cannot be read ({error.strerror or error})") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"reuse={str(path)!r}: not what `expertly lab reproduce --out DIR` writes") from None
        for key, value in self.settings.items():
            if found[key] != value:
                raise ConfigError(f"reuse={str(path)!r}: {key} was {found[key]!r:.120}, now it is {value!r:.120}")
        return {one.name: one for one in results}

    def facts(self, results: Sequence[Result]) -> dict[str, Any]:
        """Settings and results, for JSON."""
        return {
            "settings": self.settings,
            "results": [_about(EXPERIMENTS[one.name]) | one.as_dict() for one in results],
        }

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
            lines.append(f"{said}; {one.sizes}" + (f"; {one.weights_note}" if one.weights_note else ""))
        lines.append(
            f"{self.settings['tokens']} decoded tokens are simulated, or all that there are, over "
            f"{self.settings['seeds']} seeds. Each parts the requests anew: 70 % are to learn from (`--split 7:3`), "
            f"of which {LEARNED_TOKENS} tokens are, or 120 requests if that is more; those simulated are of the rest, "
            "from an empty cache. Where trained networks learned from this trace, seeds order its two parts anew. Hit "
            "rates are of decode ([conventions](conventions.md)). Where a trace lacks what a system predicts from, its "
            "prediction is modelled, right as often as ProMoE (section 4) found skip prediction to be, and labelled so."
        )
        return lines + ["`--quick`: few tokens of one seed, so that little can be told."] * self._quick


_sessions: list[Session] = []
"""Of this process, where it is one of several; at most one."""


def _open_session(make: Callable[[Path], Session], scratch: Path) -> None:
    folder = scratch / str(os.getpid())
    folder.mkdir()
    _sessions.append(make(folder))


def _result(name: str) -> Result:
    return _sessions[0].result(EXPERIMENTS[name])


def _about(one: Experiment) -> dict[str, Any]:
    return {"paper": one.paper, "figures": list(one.figures), "title": one.title, "shows": one.shows}


def _digest(path: Path | None) -> str | None:
    """Of what a file holds, which has been read before."""
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


# -- the report --------------------------------------------------------------------------------------------------

Grid = Callable[[Sequence[str], Sequence[Sequence[str]]], str]


def markdown(command: str, about: Sequence[str], results: Sequence[Result]) -> str:
    """The whole page: `results.md.jinja` beside this file, filled in."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["row"] = lambda cells: "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    source = files("expertly.lab.papers").joinpath("results.md.jinja").read_text(encoding="utf-8")
    page = environment.from_string(source).render(
        command=command,
        about=about,
        pairs=[(EXPERIMENTS[one.name], one) for one in results],
        papers=PAPERS,
        count=lambda verdict=None: sum(one.count(verdict) for one in results),
    )
    return page.rstrip() + "\n"


def text(result: Result, grid: Grid) -> str:
    """For a terminal; `grid` lays out a table of headers and rows."""
    one = EXPERIMENTS[result.name]
    lines = [f"{one.name}  {one.title} ({one.where})", f"the paper: {one.shows}"]
    for finding in result.findings:
        lines += ["", f"{finding.trace}: {finding.setting}"]
        lines += [f"measured on {finding.measured_on}"] * bool(finding.measured_on)
        for table in finding.tables:
            lines += ["", table.title, grid(table.headers, table.shown())]
        lines.append("")
        for check in finding.checks:
            lines += [
                f"[{check.verdict}] {check.claim}: {check.measured}"
                + (f"; in the paper {check.paper}" if check.paper else ""),
                *[f"    why: {check.why}"] * bool(check.why),
            ]
        lines += [f"note: {note}" for note in finding.notes]
    lines += [f"not run on {reason}" for reason in result.left_out]
    return "\n".join([*lines, f"direction: {result.verdict} ({result.seconds:.0f} s)", ""])


# -- a trace of the demo model -------------------------------------------------------------------------------------

PROMPTS = {False: 90, True: 30}
"""By --quick."""
NEW_TOKENS = {False: 48, True: 32}
TEMPLATES = {
    "story": "Once upon a time there was {} who wanted to see {}. One morning",
    "question": "Question: what is {} good for, and why do people compare it with {}? Answer:",
    "sums": "{} costs 12 coins and {} costs 7 coins. How many coins do 3 of each cost? Let us think step by step.",
    "code": "def find(items):\n    # returns {} that comes before {} in the list\n",
    "instruction": "Instruction: write a short letter about {} to a friend who likes {}.\nResponse:",
}
FIRST = ("an old fisherman", "a clock", "the smallest boat", "a wooden bridge", "a grey cat", "the last train")
SECOND = ("the sea", "a garden", "the mountains", "music")


def made_up(num: int) -> list[tuple[str, str]]:
    """So many prompts of five categories in turn, no two alike: (category, prompt)."""
    pairs = [(first, second) for first in FIRST for second in SECOND]
    every = [
        (category, template.format(*pairs[(5 * at + which) % len(pairs)]))
        for at in range(len(pairs))
        for which, (category, template) in enumerate(TEMPLATES.items())
    ]
    return every[:num]


def demo_trace(quick: bool, say: Callable[[str], None]) -> Path:
    """The demo model's answers to prompts made up here, recorded in full once; kept in the cache folder."""
    folder = cache_folder() / "reproduce" / f"demo-{PROMPTS[quick]}"
    if (folder / "manifest.json").is_file():
        return folder
    say(f"expertly: recording the demo model's answers to {PROMPTS[quick]} prompts, once")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        _record(made_up(PROMPTS[quick]), made, NEW_TOKENS[quick])
        shutil.rmtree(folder, ignore_errors=True)  # what another version left
        try:
            made.replace(folder)
        except OSError as error:
            if not (folder / "manifest.json").is_file():  # else another process was first
                raise ExpertlyError(f"{folder}: the recording could not be kept ({error}); give --trace") from None
    return folder


def _record(prompts: Sequence[tuple[str, str]], out: Path, num_tokens: int) -> None:
    from expertly import api
    from expertly.lab.playing import answer, chooser
    from expertly.lab.recording import record

    model, tokenizer = api.load(None, system="resident", learned="off", device="cpu")
    try:
        choose = chooser(0.8, 0)
        with record(model, out, full=True, name="demo") as recording:
            for category, prompt in prompts:
                ids = tokenizer(prompt, return_token_type_ids=False)["input_ids"]
                recording.begin_request(category, prompt, len(ids))
                answer(model, ids, num_tokens, choose)
    finally:
        api.unload(model)
