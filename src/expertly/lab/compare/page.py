"""The report: one HTML file that holds everything it shows, without a script, made from the results alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from expertly.core.resources import parse_memory
from expertly.lab.compare import gantt
from expertly.lab.compare.charts import MEASURES, PREFETCH, Measure, against_budget, latencies
from expertly.lab.compare.headline import failures_in_words
from expertly.lab.compare.marks import Mark, legend, marks_of
from expertly.lab.compare.style import STYLE
from expertly.lab.compare.svg import element
from expertly.lab.compare.tables import prefetch_table, results_table
from expertly.lab.compare.units import counted, format_nbytes, format_seconds

WORDS = {
    "hit rate": "experts that were wholly in memory when the router asked for them, in decode",
    "TTFT, TPOT": "time to the first token, and from one token to the next: medians over the requests (and rounds), "
    "with quartiles where runs differ",
    "to the baseline": "TPOT against the baseline's for the same request in the same round: the median of these ratios",
    "stall": "time that the model waited for transfers, for each token of an answer",
    "loaded": "bytes moved for experts, demanded or ahead, prompts included, for each token of an answer",
    "coverage": "would-be misses that loading ahead served",
    "accuracy": "experts loaded ahead that were needed",
    "timeliness": "of those, the ones that were there in time",
    "belady": "replacement that knows the future, a cache for each layer, no loading ahead",
    "belady-global": "the same in one cache over all layers: nothing loads fewer bytes",
    "oracle": "knows the future, and loads ahead as early as memory and link allow: the bound on time",
    "resident": "every expert in memory, whatever that takes: computing alone",
}


def page(results: Mapping[str, Any]) -> str:
    """All of it. `results` are those of Comparison.results, as JSON has them."""
    rows, settings = results["rows"], results["settings"]
    marks = marks_of(settings["systems"])
    shown = [mark for name, mark in marks.items() if any(row["system"] == name for row in rows)]
    title = f"Systems for {results['source']['name']}"
    body = [_head(title, results), _headline(results), _failures(results)]
    if rows:
        body += [_tables(rows, settings), _against_budgets(rows, settings, marks, shown)]
        body += [_latencies(rows, settings, marks, shown), _prefetch(rows, settings, marks)]
        body += [_timelines(results["timelines"])]
    body += [_how(results), _words()]
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    icon = '<link rel="icon" href="data:,">'  # else a browser asks for one
    head = element("head", meta + icon + element("title", escape(title)) + element("style", STYLE))
    main = element("main", "\n".join(part for part in body if part))
    return f'<!doctype html>\n<html lang="en">{head}\n<body>{main}</body></html>\n'


def _head(title: str, results: Mapping[str, Any]) -> str:
    source, settings = results["source"], results["settings"]
    said = []
    if "layers" in source:
        size = "" if source["expert_bytes"] is None else f", {format_nbytes(source['expert_bytes'])} in all"
        said.append(f"{source['layers']} layers of {source['experts']} experts, top-{source['top_k']}{size}.")
        rounds = f", {counted(settings['rounds'], 'round')}" if results["engine"] is not None else ""
        said.append(f"{counted(source['requests'], 'request')} of {counted(source['tokens'], 'token')}{rounds}.")
    if results["problem"] is not None:
        said.append(f"The comparison ended early: {results['problem']}. This is what was done by then.")
    elif results["is_interrupted"]:
        said.append("The comparison was interrupted: this is what was done by then.")
    return element("h1", escape(title)) + element("p", escape(" ".join(said)), class_="soft")


def _headline(results: Mapping[str, Any]) -> str:
    items = ""
    for sentence in results["headline"]:
        verdict, end, rest = sentence.partition(". Best possible")
        items += element("li", element("strong", escape(verdict)) + escape(end + rest))
    return element("section", element("ul", items), class_="headline") if items else ""


def _failures(results: Mapping[str, Any]) -> str:
    """Which systems did not come through, and why."""
    items = [element("li", escape(said)) for said in failures_in_words(results)]
    if not items:
        return ""
    return element("section", element("h3", "Did not come through") + element("ul", "".join(items)), class_="failures")


def _tables(rows: Sequence[dict[str, Any]], settings: Mapping[str, Any]) -> str:
    parts = [element("h2", "Results")]
    for memory in settings["memories"]:
        nbytes = next((row["memory_bytes"] for row in rows if row["memory"] == memory and row["memory_bytes"]), None)
        amount = "" if nbytes is None else f" ({format_nbytes(nbytes)})"
        parts += [element("h3", escape(f"Memory for experts: {memory}{amount}"))]
        parts += [results_table(rows, memory, settings["baseline"])]
    return "".join(parts)


def _against_budgets(
    rows: Sequence[dict[str, Any]], settings: Mapping[str, Any], marks: dict[str, Mark], shown: Sequence[Mark]
) -> str:
    charts = _measured(MEASURES, rows, settings, marks)
    if not charts:
        return ""
    note = "Bounds are dashed, and simulated; thick lines are quartiles. Pointing at a mark shows its value."
    return element("h2", "Against the budget") + element("p", note, class_="soft") + legend(shown) + _charts(charts)


def _measured(
    measures: Iterable[Measure],
    rows: Sequence[dict[str, Any]],
    settings: Mapping[str, Any],
    marks: dict[str, Mark],
) -> list[str]:
    """Engine and simulator of each measure, one beside the other."""
    places = _places(rows, settings["memories"])
    made = [
        against_budget(measure, where, rows, marks, places) for measure in measures for where in ("engine", "simulated")
    ]
    return [chart for chart in made if chart is not None]


def _places(rows: Sequence[dict[str, Any]], memories: Sequence[str]) -> dict[str, float]:
    """Of each budget on the axis: shares and bytes as they are, a mixture of both by the bytes that rows had."""
    if all(memory.strip().endswith("%") for memory in memories):
        return {memory: float(parse_memory(memory, 1 << 40) or 0) for memory in memories}
    known = {row["memory"]: float(row["memory_bytes"]) for row in rows if row["memory_bytes"] and not row["is_bound"]}
    return {memory: known.get(memory, float(index)) for index, memory in enumerate(memories)}


def _latencies(
    rows: Sequence[dict[str, Any]], settings: Mapping[str, Any], marks: dict[str, Mark], shown: Sequence[Mark]
) -> str:
    made = [
        latencies(where, memory, rows, marks) for memory in settings["memories"] for where in ("engine", "simulated")
    ]
    charts = [chart for chart in made if chart is not None]
    if not charts:
        return ""
    note = (
        "The share of requests that were answered within a time; of the engine, each request's median over the rounds."
    )
    return element("h2", "Request latency") + element("p", note, class_="soft") + legend(shown) + _charts(charts)


def _prefetch(rows: Sequence[dict[str, Any]], settings: Mapping[str, Any], marks: dict[str, Mark]) -> str:
    table = prefetch_table(rows)
    if table is None:
        return ""
    loading = [row for row in rows if any(row[where] and row[where]["accuracy"] is not None for where in row_groups())]
    names = {row["system"] for row in loading}
    shown = legend([mark for name, mark in marks.items() if name in names])
    return element("h2", "Loading ahead") + shown + _charts(_measured(PREFETCH, loading, settings, marks)) + table


def row_groups() -> tuple[str, str]:
    """Where figures of a row come from."""
    return ("engine", "simulated")


def _timelines(timelines: Sequence[Mapping[str, Any]]) -> str:
    if not timelines:
        return ""
    note = (
        f"One token in the middle of an answer with {timelines[0]['memory']} of memory, simulated, on one scale. The "
        "device computes layer by layer; the link brings experts (layer.expert). Pointing at a bar shows its segments "
        "and times."
    )
    length_ns = max(one["length_ns"] for one in timelines)
    parts = [element("h2", "One token in time"), element("p", escape(note), class_="soft"), gantt.legend(timelines)]
    for one in timelines:
        parts.append(element("h3", escape(f"{one['system']}: {format_seconds(one['length_ns'] / 1e9)}")))
        parts.append(element("div", gantt.gantt(one, length_ns), class_="scroll", tabindex=0))
    return "".join(parts)


def _charts(charts: Sequence[str]) -> str:
    return element("div", "".join(element("figure", chart) for chart in charts), class_="charts")


def _how(results: Mapping[str, Any]) -> str:
    """Everything that one needs to do it again."""
    machine, source, settings = results["machine"], results["source"], results["settings"]
    facts = {
        "machine": f"{machine['cpu']}, {machine['num_cpus']} CPUs; load average {machine['load_average'][0]:.1f}",
        "simulated on": results["hardware_from"] or "-",
        "model": ", ".join(str(source[key]) for key in ("model", "dtype", "device") if key in source) or source["name"],
        "experts on disk": f"codec {settings['codec']}",
        "requests": _requests(source, settings),
        "made": f"{results['created']}, "
        + ", ".join(f"{name} {number}" for name, number in results["versions"].items()),
    }
    if results["engine"] is not None:
        facts["turns"] = _turns(results["engine"]["together"])
    listed = "".join(element("dt", escape(name)) + element("dd", escape(said)) for name, said in facts.items())
    notes = "".join(element("li", escape(note)) for note in results["notes"])
    parts = [element("h2", "How this was measured"), element("dl", listed), element("ul", notes) if notes else ""]
    parts.append(element("pre", element("code", escape(results["command"]))))
    parts.append(element("p", "All numbers, request by request, are in results.json beside this file.", class_="soft"))
    return "".join(parts)


def _requests(source: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    if "requests" not in source:
        return "-"
    learned = f" after {source['training_requests']} to learn from" if source["training_requests"] else ""
    answers = f", answers with temperature {settings['temperature']:g}" if source["kind"] == "model" else ""
    return f"{source['requests']}{learned}, {source['tokens']} tokens in all{answers}, seed {settings['seed']}"


def _turns(together: Mapping[str, bool]) -> str:
    ways = {True: "a process for each system at the same time, in turn request by request, one computes at a time"}
    ways[False] = "one process after the other, in turn round by round: memory does not allow all models at once"
    if len(set(together.values())) == 1:
        return ways[next(iter(together.values()))]
    return "; ".join(f"{memory}: {ways[value]}" for memory, value in together.items())


def _words() -> str:
    listed = "".join(element("dt", escape(name)) + element("dd", escape(said)) for name, said in WORDS.items())
    return element("h2", "What the words mean") + element("dl", listed)
