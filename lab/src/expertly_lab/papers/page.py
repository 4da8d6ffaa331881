"""The one report of what experiments found: text for a terminal, a page a paper, JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from expertly_lab.papers.judge import FORMATS, Cells, Claim, Metric, Sample, Verdict
from expertly_lab.papers.runner import PAPERS, Finding, Result, Session

Grid = Callable[[Sequence[str], Sequence[Sequence[str]]], str]

ASSUMED = (
    "Times are of a simulated clock. Computing is assumed, from the machine's profile: with LRU and a quarter of the "
    "experts it is {} of a token's time. So is the link's rate. What is hit, loaded and evicted is decided by the code "
    "that the engine runs. No time here was compared with a GPU."
)
READ = (
    "A cell says how the claim stands on a trace, and the comparison that decides: how much better (+) the claimed "
    "system is, with the 95 % interval of requests drawn anew. *Cannot be told*: that interval has zero in it. "
    "Everything else is in results.json."
)


def shown(sample: Sample, metric: Metric) -> str:
    """A value, its interval in brackets."""
    show = FORMATS[metric.unit]
    bounds = "" if sample.interval is None else f" [{', '.join(map(show, sample.interval))}]"
    return f"{show(sample.value)}{bounds}"


def text(result: Result, grid: Grid) -> str:
    """For a terminal; `grid` lays out a table of headers and rows."""
    experiment = result.experiment
    lines = [f"{experiment.name}  {experiment.title}", f"the paper: {experiment.shows}"]
    lines += [f"note: {experiment.note}"] * bool(experiment.note)
    for finding in result.findings:
        if finding.left_out:
            lines += ["", f"{finding.trace}: not run: {finding.left_out}"]
            continue
        lines += ["", f"{finding.trace} ({finding.seconds:.0f} s)", grid(*_table(experiment.claims, finding.cells))]
        for claim, verdict in finding.verdicts:
            lines.append(f"[{_words(verdict, finding)}] {claim.text}")
            for effect in verdict.effects:
                lines.append(f"    {effect}" + ("" if effect.paper is None else f"; in the paper {effect.paper:+.0%}"))
    return "\n".join([*lines, ""])


def _table(claims: Sequence[Claim], cells: Cells) -> tuple[list[str], list[list[str]]]:
    """A line a cell, a column a metric that some claim is about."""
    metrics = list(dict.fromkeys(claim.metric for claim in claims))
    rows = [
        [point, system + " (modelled)" * cell.is_modelled]
        + [shown(cell.samples[metric.name], metric) if metric.name in cell.samples else "-" for metric in metrics]
        for (point, system), cell in cells.items()
    ]
    return ["at", "system", *(metric.name for metric in metrics)], rows


def _words(verdict: Verdict, finding: Finding) -> str:
    return verdict.words + " (made-up arrivals)" * finding.has_made_up_arrivals


def pages(session: Session, origin: Mapping[str, Any], results: Sequence[Result]) -> dict[str, str]:
    """Markdown by file name: results.md, and results/PAPER.md of each paper. `origin`: as in `facts`."""
    by_paper: dict[str, list[Result]] = {}
    for result in results:
        by_paper.setdefault(result.experiment.paper, []).append(result)
    shares = {subject.name: session.lab(subject.name).assumed_share() for subject in session.subjects}
    assumed = ", ".join(f"{share:.0%} ({name})" for name, share in shares.items())
    made = {
        f"results/{paper}.md": _page(PAPERS[paper].title, assumed, results_of) for paper, results_of in by_paper.items()
    }
    about = [f"- `{name}`: {words}" for name, words in session.about().items()]
    rows = [
        [f"[{PAPERS[paper].title}](results/{paper}.md)", *map(str, _counts(results_of))]
        for paper, results_of in by_paper.items()
    ]
    withstood, held = _shuffled(results)
    lines = [
        "# What the papers show, and what is found here",
        "",
        f"Generated at commit {origin['commit']}, on {origin['machine']}, by the command below; do not edit.",
        "",
        f"```sh\n{origin['command']}\n```",
        "",
        *about,
        f"- {session.settings['tokens']} decoded tokens of each are simulated, at most a twentieth of them of one "
        "request, from an empty cache; 70 % of the requests are to learn from, the others are simulated. Where a trace "
        "lacks what a system predicts from, its prediction is modelled, as right as ProMoE (section 4) found skip "
        "prediction to be, and the verdict says so.",
        "- Missing: routing of Mixtral-8x7B, Qwen1.5-MoE and Phi-3.5-MoE, which the papers ran. Who has a machine for "
        "one makes it with `expertly lab trace record MODEL --full --prompts FILE --out DIR`; `--trace DIR` takes it.",
        "",
        *_markdown(["paper", "hold", "in part", "opposite", "cannot be told"], rows),
        "",
        f"With the systems' names shuffled, none keeping its own, {held - withstood} of the {held} claims that hold do "
        "not.",
    ]
    return {"results.md": "\n".join(lines) + "\n", **made}


def _page(title: str, assumed: str, results: Sequence[Result]) -> str:
    lines = [f"# {title}", "", ASSUMED.format(assumed), "", READ]
    for result in results:
        experiment = result.experiment
        lines += ["", f"## {experiment.figure}: {experiment.title}", "", f"The paper: {experiment.shows}"]
        lines += ["", experiment.note] if experiment.note else []
        findings = [finding for finding in result.findings if finding.verdicts]
        rows = []
        for claim in experiment.claims:
            verdicts = [(finding, _verdict(finding, claim)) for finding in findings]
            if any(verdict for _, verdict in verdicts):
                rows.append([claim.text, _paper(claim), *(_cell(finding, verdict) for finding, verdict in verdicts)])
        if rows:
            lines += ["", *_markdown(["claim", "paper", *(finding.trace for finding in findings)], rows)]
    return "\n".join(lines) + "\n"


def _verdict(finding: Finding, claim: Claim) -> Verdict | None:
    return next((verdict for known, verdict in finding.verdicts if known.text == claim.text), None)


def _cell(finding: Finding, verdict: Verdict | None) -> str:
    return "-" if verdict is None else f"**{_words(verdict, finding)}** {verdict.deciding}"


def _paper(claim: Claim) -> str:
    """The effect there, as printed."""
    printed = getattr(claim, "paper", None)
    if isinstance(printed, Mapping):
        return ", ".join(f"{rival} {size:+.0%}" for rival, size in printed.items()) or "-"
    low, high = getattr(claim, "low", None), getattr(claim, "high", None)
    if low is not None:
        show = FORMATS[claim.metric.unit]
        return f"from {show(low)}" if high == float("inf") else f"{show(low)} to {show(high)}"
    return "-" if printed is None else f"{printed:+.0%}"


def _markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [headers, ["---"] * len(headers), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _counts(results: Sequence[Result]) -> list[int]:
    findings = [finding for result in results for finding in result.findings]
    kinds = Counter(verdict.kind for finding in findings for _, verdict in finding.verdicts)
    return [kinds[kind] for kind in ("holds", "in part", "opposite", "cannot be told")]


def _shuffled(results: Sequence[Result]) -> tuple[int, int]:
    """Claims that hold with shuffled names, too, and all that hold."""
    findings = [finding for result in results for finding in result.findings]
    return sum(each.num_withstood for each in findings), sum(each.num_shuffled for each in findings)


def facts(session: Session, origin: Mapping[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """Settings and results, for JSON. `origin`: the command, commit and machine that made them."""
    withstood, held = _shuffled(results)
    return {
        **origin,
        "settings": session.settings,
        "shuffled_names": {"held": held, "withstood": withstood},
        "results": [
            {
                "name": result.experiment.name,
                "title": result.experiment.title,
                "shows": result.experiment.shows,
                "findings": [_finding(finding) for finding in result.findings],
            }
            for result in results
        ],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "trace": finding.trace,
        "has_made_up_arrivals": finding.has_made_up_arrivals,
        "left_out": finding.left_out or None,
        "seconds": round(finding.seconds, 1),
        "cells": [
            {
                "at": point,
                "system": system,
                "is_modelled": cell.is_modelled,
                "values": {name: [sample.value, sample.interval] for name, sample in cell.samples.items()},
            }
            for (point, system), cell in finding.cells.items()
        ],
        "claims": [
            {
                "text": claim.text,
                "metric": claim.metric.name,
                "verdict": verdict.kind,
                "words": _words(verdict, finding),
                "effects": [
                    {
                        "against": effect.label,
                        "value": effect.value,
                        "interval": effect.interval,
                        "paper": effect.paper,
                        "verdict": effect.verdict,
                    }
                    for effect in verdict.effects
                ],
            }
            for claim, verdict in finding.verdicts
        ],
    }
