"""What the pages say can be typed: links lead somewhere, commands parse, systems and their parts exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from expertly.policies.base import option_names, option_text
from expertly.policies.prediction import ALL_LAYERS
from expertly.policies.registry import PREDICTORS
from expertly.scheduler.systems import AUTO_SYSTEM, PARTS, SYSTEMS, get_system
from tests.command_lines import command_of, flags_of, parse
from tools.docs_tables import (
    ASKED,
    FAMILIES,
    OPTIONS,
    RESULTS,
    RUN,
    TableError,
    read_results,
    render_page,
    with_families,
    with_options,
)

REPOSITORY = Path(__file__).resolve().parent.parent
ROOTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md", "lab/README.md")
PAGES = sorted([*(REPOSITORY / name for name in ROOTS), *(REPOSITORY / "docs").rglob("*.md")])
LOG = sorted((REPOSITORY / "docs" / "log").glob("*.md"))
HISTORY = (REPOSITORY / "CHANGELOG.md", *LOG)
"""Pages that name commands as they were called once."""
NOT_OURS = ("my_", "mine", "fading", "again", "...")
"""In names of systems and commands that a page makes up, or leaves open."""

pages, now = (
    pytest.mark.parametrize("page", some, ids=lambda page: str(page.relative_to(REPOSITORY)))
    for some in (PAGES, [page for page in PAGES if page not in HISTORY])
)


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def inline(page: Path) -> list[str]:
    """What stands in backquotes, in one line each."""
    result = re.findall(r"`([^`]+)`", without_blocks(page.read_text(encoding="utf-8")))
    return [" ".join(text.split()).replace("\\|", "|") for text in result]


def typed(page: Path) -> list[list[str]]:
    """The commands of the page's blocks; what is in brackets may be left out, and is not."""
    commands = []
    for block in re.findall(r"^```sh\b.*?\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\n +", " ", block).splitlines():
            commands.append([])
            for word in shlex.split(line, comments=True):
                if word in ("|", "&&"):
                    commands.append([])
                else:
                    commands[-1].append(word.strip("[]"))
    return [command for command in commands if command]


def check_systems(text: str) -> None:
    for name in text.split(","):
        if name != AUTO_SYSTEM and not any(other in name for other in NOT_OURS):
            get_system(name)


@pages
def test_links_lead_somewhere_and_blocks_begin_as_the_site_reads_them(page: Path) -> None:
    """With anything else behind the language, a block and the headings in its comments are shown as text."""
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    fences = re.findall(r"^```.*$", text, re.MULTILINE)
    assert [fence for fence in fences if not re.fullmatch(r'```(\w+( title="[^"]+")?)?', fence)] == []


@now
def test_files_that_are_named_are_there(page: Path) -> None:
    made = re.findall(r'^```python title="(\S+)"$', page.read_text(encoding="utf-8"), re.MULTILINE)
    folders = (page.parent, REPOSITORY, REPOSITORY / "src" / "expertly")
    for name in inline(page):
        if re.fullmatch(r"[\w/.-]+\.(py|toml|sh)|(bench|tests|tools)/[\w/.-]+", name) and name not in made:
            assert any((folder / name).exists() for folder in folders), name


@pages
def test_commands_and_systems_exist(page: Path) -> None:
    for program, *words in typed(page):
        if program == "expertly" and words[0] not in NOT_OURS and (systems := parse(words).get("system")) is not None:
            check_systems(systems)
    for text in inline(page) if page not in HISTORY else ():
        program, *words = text.split(" ")
        if program == "expertly" and words and not {"COMMAND"} & set(words):
            names = [word for word in words if not word.startswith("-")]
            command, _ = command_of([word.partition("|")[0] for word in names])
            assert {word for word in words if word.startswith("--")} <= flags_of(command), text
            if "--system" in words[:-1]:
                check_systems(words[words.index("--system") + 1])
        elif re.fullmatch(r"[a-z][\w-]*(:[\w-]+=[\w.-]+)+", text):
            check_systems(text)


@now
def test_benchmarks_exist_and_have_the_flags_that_are_named(page: Path) -> None:
    for text in [" ".join(command) for command in typed(page)] + inline(page):
        for script, rest in re.findall(r"(?:python|bash) ((?:bench|tools)/[\w./]+)(.*)", text):
            source = (REPOSITORY / script).read_text(encoding="utf-8")
            for flag in re.findall(r"(--[\w-]+)", rest):
                assert f'"{flag}"' in source or flag[2:].replace("-", "_") + "=" in source, f"{text}: no {flag}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem in SYSTEMS.built_in], ids=lambda page: page.stem)
def test_defaults_are_those_of_the_code(page: Path) -> None:
    """In the table of a preset's parameters."""
    system = SYSTEMS[page.stem]
    parts = {key: getattr(system, key) for key in PARTS}
    if system.prediction != "none":
        options = PREDICTORS[system.prediction].parse({})
        parts |= {key: getattr(options, key) for key in option_names(type(options))}
    text = page.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]+?) \|", text, re.MULTILINE)
    message = {key: text.strip("`") for key, text in rows if parts.get(key) is not None}
    values = {key: "all" if parts[key] == ALL_LAYERS else option_text(parts[key]).removesuffix(".0") for key in message}
    assert message == values
    assert bool(message) == ("## Parameters" in text)


@pages
def test_tables_are_what_their_files_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_families(with_options(render_page(text))) == text, "python tools/docs_tables.py"


@pytest.mark.parametrize("file", sorted(path.name for path in RESULTS.glob("*.json")))
def test_results_that_are_kept_can_be_measured_again(file: str) -> None:
    assert read_results(file)["results"]
    assert any(file in page.read_text(encoding="utf-8") for page in PAGES), "no page speaks of it"


def test_pages_are_as_short_as_contributing_says() -> None:
    total = 0
    for page in PAGES:
        if page not in LOG and page.name != "results.md" and page.parent.name != "results":
            text = page.read_text(encoding="utf-8")
            assert len(text.split()) < 1500, page
            for generated in (FAMILIES, OPTIONS, ASKED, RUN):
                text = generated.sub("", text)
            total += len(text.split())
        elif page.parent.name == "results":  # a paper's; a table's bars are no words
            assert sum(bool(word.strip("|-")) for word in page.read_text(encoding="utf-8").split()) <= 1200, page
    assert total <= 20_000
    readme = re.sub(r"<!--.*?-->\n", "", (REPOSITORY / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(readme.splitlines()) <= 80


@pytest.mark.parametrize(
    ("column", "commit", "script", "expected"),
    [
        ("{tpot_s:ms}", "393c126", "simulated", "| TPOT |\n| --- |\n| 117 ms |\n| - |\n"),
        ("{tpot_s:ms}", "393c126+changes", "simulated", "accepted: a commit without changes"),
        ("{tpot_s:ms}", None, "simulated", "accepted: a commit without changes"),
        ("{tpot_s:ms}", "393c126", "offload", "accepted: a script of this repository"),
        ("{ttft_s:ms}", "393c126", "simulated", r"'TPOT' asks for \['ttft_s'\]"),
    ],
)
def test_a_table_is_of_a_file_from_a_commit_whose_script_exists(
    tmp_path: Path, column: str, commit: str | None, script: str, expected: str
) -> None:
    page = f'<!-- results: one.json\ncolumns:\n  TPOT: "{column}"\n-->\n<!-- /results -->\n'
    with pytest.raises(TableError, match="no such file"):
        render_page(page, tmp_path)
    report = {
        "command": f"python bench/{script}.py",
        "date": "2026-11-22T10:00:00",
        "commit": commit,
        "machine": {"cores": 2, "cpu": "a Xeon"},
        "results": [{"tpot_s": 0.1167}, {"tpot_s": None}],
    }
    (tmp_path / "one.json").write_text(json.dumps(report), encoding="utf-8")
    if expected.startswith("|"):
        assert expected in render_page(page, tmp_path)
        assert render_page(render_page(page, tmp_path), tmp_path) == render_page(page, tmp_path)
    else:
        with pytest.raises(TableError, match=expected):
            render_page(page, tmp_path)
