"""The generated tables of README.md and docs/: measurements from bench/results/*.json, and the options of `load`.

    python tools/docs_tables.py            rewrite the tables of every page
    python tools/docs_tables.py --check    change nothing; exit 1 if a page differs from its files

A page asks for a table with a comment, in YAML; the table is written between it and the closing mark:

    <!-- results: simulated.json
    where: {system: [lru, fmoe], memory: {25%: a quarter}}
    columns:
      system: "`{system}`"
      TPOT: "{tpot_s:ms}"
    -->
    <!-- /results -->

`where` keeps the rows whose field has one of these values, in the order of the file; with a mapping, the table shows
the text on the right in place of the value. A column is a Python format string over the fields of a row, with the
formats of UNITS added. A field that a row lacks makes its cell "-".

`side_by_side: [size, peer]` joins the rows of one `size`: the field `tokens_per_s` of the row whose `peer` is
`llama.cpp` becomes `llama.cpp.tokens_per_s`. A column `"{peer}": "{tokens_per_s}"` is then one for each `peer`.

Between `<!-- options -->` and `<!-- /options -->` stand the options of `expertly.load`, from expertly.options; between
`<!-- families -->` and `<!-- /families -->` the families of tests/engine/test_every_family.py, and between `<!-- run
-->` and `<!-- /run -->` how many of them run, and which.

Refused: a file that is missing; one measured from a tree with uncommitted changes; one whose command names no script of
this repository, so that nobody can run it again; a field that no row has; a table without rows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import string
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from expertly.options import LoadOptions

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "bench" / "results"
ASKED = re.compile(r"<!-- results: (?P<file>\S+)\n(?P<spec>.*?)\n-->\n(?P<table>.*?)<!-- /results -->", re.DOTALL)
SCRIPT = re.compile(r"\bpython (?P<path>\S+\.py)\b")
OPTIONS = re.compile(r"<!-- options -->\n.*?<!-- /options -->", re.DOTALL)

FAMILIES = re.compile(r"<!-- families -->\n.*?<!-- /families -->", re.DOTALL)
RUN = re.compile(r"<!-- run -->[^<]*<!-- /run -->")

UNITS: Mapping[str, Callable[[float], str]] = {
    "ms": lambda seconds: f"{seconds * 1e3:.3g} ms",
    "s": lambda seconds: f"{seconds:.3g} s",
    "%": lambda share: f"{share:.1%}".replace("%", " %"),
    "MB": lambda nbytes: f"{nbytes / 1e6:,.0f} MB",
    "MiB": lambda nbytes: f"{nbytes / (1 << 20):,.0f} MiB",
    "GB/s": lambda nbytes_per_s: f"{nbytes_per_s / 1e9:.2f} GB/s",
    "us": lambda microseconds: f"{microseconds:,.0f} us",
    "x": lambda ratio: f"{ratio:.2f}x",
    "fits": lambda fits: "" if fits else " (does not fit)",
}


class TableError(Exception):
    """A table that cannot be made; the message names page or file and what is wrong."""


class _Cells(string.Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        return kwargs[field_name], field_name  # the whole name: some have a dot in them

    def format_field(self, value: Any, format_spec: str) -> Any:
        return UNITS[format_spec](value) if format_spec in UNITS else super().format_field(value, format_spec)


def read_results(file: str, folder: Path = RESULTS) -> dict[str, Any]:
    """A benchmark's report. Raises TableError if it is missing, from no commit, or its script is gone."""
    path = folder / file
    if not path.is_file():
        raise TableError(f"bench/results/{file}: there is no such file; run its benchmark and keep what it writes")
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    commit = report.get("commit")
    if not commit or commit.endswith("+changes"):
        raise TableError(
            f"bench/results/{file}: measured at commit {commit}; accepted: a commit without changes. Run it again"
        )
    script = SCRIPT.search(report.get("command") or "")
    if script is None or not (REPOSITORY / script["path"]).is_file():
        raise TableError(
            f"bench/results/{file}: command={report.get('command')!r}; accepted: a script of this repository. "
            "Nobody can run it again: delete the file and its tables"
        )
    return report


def render_table(file: str, spec: dict[str, Any], folder: Path = RESULTS) -> str:
    """Markdown: the rows that `spec` asks for, and below them where they are from."""
    report = read_results(file, folder)
    rows: list[dict[str, Any]] = report["results"]
    for field, values in spec.get("where", {}).items():
        rows = [row for row in rows if row.get(field) in (values if isinstance(values, list | dict) else [values])]
        if isinstance(values, dict):
            rows = [row | {field: values[row[field]]} for row in rows]
    if not rows:
        raise TableError(f"bench/results/{file}: where={spec['where']}: no row of the file")
    columns: dict[str, str] = spec["columns"]
    if "side_by_side" in spec:
        same, each = spec["side_by_side"]
        columns = one_for_each(columns, each, [row[each] for row in rows])
        rows = side_by_side(rows, same, each)
    known = {name for row in [*report["results"], *rows] for name in row}
    for title, cell in columns.items():
        asked = {name for _, name, _, _ in string.Formatter().parse(cell) if name}
        if not asked <= known:
            raise TableError(
                f"bench/results/{file}: column {title!r} asks for {sorted(asked - known)}; no row has that"
            )
    lines = [columns, ["---"] * len(columns), *([_cell(cell, row) for cell in columns.values()] for row in rows)]
    machine = report["machine"]
    source = (
        f"`bench/results/{file}`: {report['date'][:10]}, commit {report['commit']}, {machine['cores']} cores of "
        f"{machine['cpu']}; `{report['command']}`"
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n<small>{as_html(source)}</small>\n"


def side_by_side(rows: list[dict[str, Any]], same: str, each: str) -> list[dict[str, Any]]:
    """A row for each value of `same`, whose fields are those of its rows behind their value of `each` and a dot."""
    joined: dict[Any, dict[str, Any]] = {}
    for row in rows:
        fields_of_row = {f"{row[each]}.{name}": value for name, value in row.items()}
        joined.setdefault(row[same], {same: row[same]}).update(fields_of_row)
    return list(joined.values())


def one_for_each(columns: dict[str, str], each: str, values: list[str]) -> dict[str, str]:
    """The columns, with one for each of the values in place of a column whose title is `{each}`."""
    found: dict[str, str] = {}
    for title, cell in columns.items():
        found |= {one: cell.replace("{", f"{{{one}.") for one in values} if title == f"{{{each}}}" else {title: cell}
    return found


def as_html(text: str) -> str:
    """Backquoted parts as code, the rest escaped."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)


def _cell(cell: str, row: dict[str, Any]) -> str:
    names = [name for _, name, _, _ in string.Formatter().parse(cell) if name]
    if any(row.get(name) is None for name in names):
        return "-"
    return _Cells().vformat(cell, (), row)


def render_page(text: str, folder: Path = RESULTS) -> str:
    """The page with every table that it asks for made anew."""

    def table(match: re.Match[str]) -> str:
        made = render_table(match["file"], yaml.safe_load(match["spec"]), folder)
        return f"<!-- results: {match['file']}\n{match['spec']}\n-->\n\n{made}\n<!-- /results -->"

    return ASKED.sub(table, text)


def with_options(text: str) -> str:
    """The page with the table of options that it asks for made anew."""
    lines = ["| option | default | |", "| --- | --- | --- |"]
    for field in fields(LoadOptions):
        meaning = field.metadata["option"].help.replace("|", "\\|")
        lines.append(f"| `{field.name}` | `{field.default}` | {meaning} |")
    table = "\n".join(lines)
    return OPTIONS.sub(lambda _: f"<!-- options -->\n\n{table}\n\n<!-- /options -->", text)


def with_families(text: str) -> str:
    """The page with the table or list of families that it asks for made anew."""
    if not FAMILIES.search(text) and not RUN.search(text):
        return text
    sys.path.insert(0, str(REPOSITORY))
    every_family = importlib.import_module("tests.every_family")
    conformance = importlib.import_module("tests.engine.test_every_family")

    reasons = conformance.CANNOT_BE_MADE | conformance.REFUSED
    runs = sorted(every_family.families().keys() - reasons.keys())
    wrappers = [name for name in runs if every_family.is_wrapper(name)]
    lines = ["| | model types |", "| --- | --- |"]
    for title, names in (
        ("text", [name for name in runs if name not in wrappers]),
        ("text of models that also see or hear, as they are published", wrappers),
        ("without prediction", [f"{name} ({reason})" for name, reason in conformance.NO_LOOKAHEAD.items()]),
        ("refused", [f"{name} ({reason})" for name, reason in conformance.REFUSED.items()]),
        ("not tried", [f"{name} ({reason})" for name, reason in conformance.CANNOT_BE_MADE.items()]),
    ):
        lines.append(f"| {title}: {len(names)} | {', '.join(names)} |")
    table = "\n".join(lines)
    text = FAMILIES.sub(lambda _: f"<!-- families -->\n\n{table}\n\n<!-- /families -->", text)
    return RUN.sub(f"<!-- run -->{len(runs)}: {', '.join(runs)}<!-- /run -->", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    failed = False
    for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        try:
            made = with_families(with_options(render_page(text)))
        except TableError as error:
            print(f"{page.relative_to(REPOSITORY)}: {error}", file=sys.stderr)
            failed = True
            continue
        if made != text and args.check:
            print(
                f"{page.relative_to(REPOSITORY)}: its tables are not what bench/results and tests say", file=sys.stderr
            )
            failed = True
        elif made != text:
            page.write_text(made, encoding="utf-8")
            print(page.relative_to(REPOSITORY))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
