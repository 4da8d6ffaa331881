"""`expertly lab reproduce`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from expertly.cli.main import main
from expertly_lab.papers.runner import PAPERS, experiments, find_experiment
from lab.tests.papers.small import full_trace, imported_trace
from tests.cli.asking import Captured, answer

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """As they are typed."""
    folder = tmp_path_factory.mktemp("traces")
    made = (full_trace(folder / "full"), imported_trace(folder / "bare"))
    return [word for trace in made for word in ("--trace", str(trace.folder))]


def reproduce(capsys: Captured, *words: object) -> dict[str, Any]:
    return answer(capsys, "lab", "reproduce", *words)


def test_the_list_names_every_experiment_and_what_it_needs(capsys: Captured) -> None:
    result = reproduce(capsys, "--list")["experiments"]
    assert [row["name"] for row in result] == [experiment.name for experiment in experiments()]
    assert main(["lab", "reproduce", "--list"]) == 0
    assert "fmoe:9" in capsys.readouterr().out


def test_an_experiment_is_printed_with_the_papers_words_and_verdicts(capsys: Captured, traces: list[str]) -> None:
    assert main(["lab", "reproduce", "fmoe:9", "--quick", *traces]) == 0
    out = capsys.readouterr().out
    assert find_experiment("fmoe:9").shows in out
    assert re.search(r"^\[(holds|in part|opposite|cannot be told).*\] fMoE ", out, re.MULTILINE)
    assert re.search(r"^    on-demand: .\d+% \[.*\]; in the paper \+70%$", out, re.MULTILINE)


def test_pages_and_numbers_are_written(capsys: Captured, traces: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    facts = reproduce(capsys, "fmoe:9,fmoe:15", "--quick", *traces, "--out", out, "--jobs", "2")
    assert json.loads((out / "results.json").read_text("utf-8")) == facts
    assert facts["settings"]["tokens"] == 150 and set(facts["settings"]["traces"]) == {"full", "bare"}
    front, page = (out / "results.md").read_text("utf-8"), (out / "results" / "fmoe.md").read_text("utf-8")
    assert facts["command"] == "expertly lab reproduce fmoe:9,fmoe:15 --trace full --trace bare --quick --out out"
    assert all(str(facts[name]) in front for name in ("command", "commit", "machine"))
    assert str(tmp_path) not in front + page
    assert "(results/fmoe.md)" in front and "of a token's time" in page
    for finding in facts["results"][0]["findings"]:
        for claim in finding["claims"]:
            assert f"| {claim['text']} |" in page and f"**{claim['words']}**" in page
            assert {effect["verdict"] for effect in claim["effects"]}
    again = reproduce(capsys, "fmoe:15,fmoe:9", "--quick", *traces, "--jobs", "1")
    for result in (*again["results"], *facts["results"]):
        for finding in result["findings"]:
            finding.pop("seconds")
    assert again["results"] == facts["results"], "processes decide nothing, nor do shared runs"


def test_arrivals_that_are_made_up_are_said_in_the_verdict(capsys: Captured, traces: list[str], tmp_path: Path) -> None:
    def words(*more: object) -> str:
        (result,) = reproduce(capsys, "fmoe:10", "--quick", *traces[:2], *more)["results"]
        (claim,) = result["findings"][0]["claims"]
        return str(claim["words"])

    rows = [f"2023-11-16 18:15:{second:02},6,9" for second in range(0, 40, 2)]
    (tmp_path / "recorded.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert words().endswith(" (made-up arrivals)")
    assert "made-up" not in words("--arrivals", tmp_path / "recorded.csv")


def test_the_tokens_and_the_seed_that_are_asked_for_are_taken(capsys: Captured, traces: list[str]) -> None:
    def hits(*words: str) -> Any:
        (result,) = reproduce(capsys, "fmoe:12b", "--quick", *words)["results"]
        return result["findings"][0]["cells"]

    usual = hits(*traces[:2])
    assert hits(*traces[:2]) == usual
    assert hits(*traces[:2], "--tokens", "40") != usual and hits(*traces[:2], "--seed", "1") != usual


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "paper"),
        (["gmoe"], "accepted: all, fmoe"),
        (["fmoe:77"], "figure='77': none of fmoe's; accepted: "),
        (["fmoe:"], "accepted: "),
        (["fmoe", "--list"], "--list lists all"),
        (["fmoe:9", "--trace", "nowhere"], "nowhere"),
        (["fmoe:9", "--out", __file__], "not a folder"),
        (["fmoe:9", "--arrivals", "nowhere.csv"], "nowhere.csv"),
        (["my_module.PAPER"], "'my_module' cannot be imported"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str, capsys: Captured) -> None:
    assert main(["lab", "reproduce", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_a_trace_the_demo_model_is_recorded_once(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from expertly_lab.papers import recorded

    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path))
    monkeypatch.setitem(recorded.PROMPTS, True, 6)
    monkeypatch.setitem(recorded.NEW_TOKENS, True, 12)
    assert main(["lab", "reproduce", "expertly:links", "--quick", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "recording the demo model's answers" in err
    (result,) = json.loads(out)["results"]
    assert result["findings"][0]["trace"] == "demo-6"
    assert main(["lab", "reproduce", "expertly:links", "--quick", "--json"]) == 0
    assert "recording" not in capsys.readouterr().err


def test_the_committed_pages_have_every_experiment_and_are_short() -> None:
    front = (DOCS / "results.md").read_text("utf-8")
    for name, paper in PAPERS.built_in.items():
        page = (DOCS / "results" / f"{name}.md").read_text("utf-8")
        assert f"(results/{name}.md)" in front
        assert len([word for word in page.split() if word.strip("|-")]) <= 1200, name
        for experiment in paper.experiments:
            assert f"## {experiment.figure}: {experiment.title}" in page, experiment.name
            assert all(f"| {claim.text} |" in page for claim in experiment.claims), experiment.name


def test_with_names_shuffled_most_claims_that_hold_do_not() -> None:
    """In the committed results: 90 % of them."""
    facts = json.loads((DOCS / "results.json").read_text("utf-8"))
    held, withstood = (facts["shuffled_names"][key] for key in ("held", "withstood"))
    assert held > 20 and withstood <= held / 10
    assert f"{held - withstood} of the {held} claims" in (DOCS / "results.md").read_text("utf-8")
