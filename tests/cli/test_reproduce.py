"""`expertly lab reproduce`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly.cli.main import main
from expertly.lab.papers.runner import experiments, find_experiment
from tests.cli.asking import Captured, answer
from tests.lab.papers.small import full_trace, imported_trace

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "results.md"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("traces")
    """As they are typed."""
    made = (imported_trace(folder / "bare"), full_trace(folder / "full"))
    return [word for trace in made for word in ("--trace", str(trace.folder))]


def reproduce(capsys: Captured, *words: object) -> dict[str, Any]:
    return answer(capsys, "lab", "reproduce", *words)


def test_the_list_names_every_experiment_and_what_it_needs(capsys: Captured) -> None:
    found = reproduce(capsys, "--list")["experiments"]
    assert [one["name"] for one in found] == [one.name for one in experiments()]
    needs = {one["name"]: one["needs"] for one in found}
    assert "weights" in needs["promoe:8"] and needs["fmoe:16"] == "any trace"
    assert main(["lab", "reproduce", "--list"]) == 0
    assert "moe-infinity:B.1" in capsys.readouterr().out


def test_an_experiment_is_printed_with_the_papers_words_and_a_verdict(capsys: Captured, traces: list[str]) -> None:
    assert main(["lab", "reproduce", "moe-infinity:2", "--quick", *traces]) == 0
    out = capsys.readouterr().out
    assert find_experiment("moe-infinity:2").shows in out
    assert re.search(r"^\[(holds|does not hold|cannot be told)\] .*: .*%", out, re.MULTILINE)
    assert out.index("full: ") < out.index("bare: "), "full traces come first"


def test_page_and_numbers_are_written_and_can_be_used_again(
    capsys: Captured, traces: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = reproduce(capsys, "fmoe:16,moe-infinity:2", "--quick", *traces, "--out", out)
    page, kept = (out / "results.md").read_text("utf-8"), json.loads((out / "results.json").read_text("utf-8"))
    assert kept == first
    assert "expertly lab reproduce fmoe:16,moe-infinity:2 --trace bare --trace full --quick" in page
    assert str(tmp_path) not in page and traces[1] not in page
    assert [one["name"] for one in first["results"]] == ["fmoe:16", "moe-infinity:2"], "not as they ended"
    for one in first["results"]:
        paper, figure = one["name"].split(":")
        assert f"[{one['name']}](results/{paper}.md#{paper}{figure})" in page
        behind = (out / "results" / f"{paper}.md").read_text("utf-8")
        assert f"## {one['name']}\n" in behind and one["verdict"] in behind
        for finding in one["findings"]:
            for check in finding["checks"]:
                size = check["size"] and f", {check['size']}"
                assert f"{finding['trace']}: **{check['verdict']}**{size}" in page
                assert check["rule"] in behind and check["measured"] in behind
    again = ["fmoe:16", "--quick", *traces, "--reuse", out / "results.json"]
    (reused,) = reproduce(capsys, *again)["results"]
    assert reused == first["results"][0]
    assert main(["lab", "reproduce", *map(str, again), "--seed", "1"]) == 2
    assert "seed was 0, now it is 1" in capsys.readouterr().err
    assert main(["lab", "reproduce", *map(str, again), "--tokens", "40"]) == 2
    assert "tokens was 150, now it is 40" in capsys.readouterr().err


def test_results_of_other_code_are_not_used_again(
    capsys: Captured, traces: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "expertly" / "__init__.py"
    source.parent.mkdir()
    source.write_text("at = 1", "utf-8")
    monkeypatch.setattr(expertly, "__file__", str(source))
    asked = ("fmoe:16", "--quick", *traces)
    first = reproduce(capsys, *asked, "--out", tmp_path / "out")
    again = ("--reuse", str(tmp_path / "out" / "results.json"))
    assert reproduce(capsys, *asked, *again) == first
    source.write_text("at = 2", "utf-8")
    assert main(["lab", "reproduce", *asked, *again]) == 2
    assert "version was '0.1.0, source " in capsys.readouterr().err


def test_a_quick_run_takes_the_tokens_and_seeds_that_are_asked_for(capsys: Captured, traces: list[str]) -> None:
    asked = ("--quick", "--tokens", "40", "--seeds", "2", "--fewer", "12:fmoe:12a")
    found = reproduce(capsys, "fmoe:12a,fmoe:12b", *traces[2:], *asked)
    few, usual = (one["findings"][0]["setting"] for one in found["results"])
    assert ", 12 passes of decode" in few and ", 40 passes of decode" in usual
    assert ", 2 seeds from 0" in few and ", 2 seeds from 0" in usual


def test_some_experiments_simulate_fewer_tokens_and_the_page_says_which(
    capsys: Captured, traces: list[str], tmp_path: Path
) -> None:
    asked = ("--fewer", "12:fmoe:12a", "--tokens", "30", "--seeds", "1")
    found = reproduce(capsys, "fmoe:12a,fmoe:12b", *traces[2:], *asked, "--out", tmp_path / "page.md")
    few, usual = (one["findings"][0]["setting"] for one in found["results"])
    assert ", 12 passes of decode" in few and ", 30 passes of decode" in usual
    assert ", 1 seed from 0" in few and ",," not in few + usual
    page = (tmp_path / "page.md").read_text("utf-8")
    assert " ".join(asked) in page and "30 decoded tokens are simulated (12 of `fmoe:12a`)" in page


def test_systems_machine_and_memory_are_asked_for(capsys: Captured, traces: list[str], tmp_path: Path) -> None:
    asked = ("--system", "lfu", "--hardware", "a100", "--memory", "30%")
    found = reproduce(capsys, "fmoe:12b,fmoe:16", "--quick", *traces, *asked, "--out", tmp_path / "page.md")
    of_eviction, of_memory = found["results"]
    setting, (table,) = (of_eviction["findings"][0][key] for key in ("setting", "tables"))
    assert setting.startswith("a100; ") and "memory 30%" in setting
    assert [row[0] for row in table["rows"]] == ["lru", "lfu", "fmoe", "lfu (added)"]
    assert of_memory["left_out"] == ["any trace: it takes no --system, --hardware, --memory; accepted: none of these"]
    assert " ".join(asked) in (tmp_path / "page.md").read_text("utf-8")
    assert main(["lab", "reproduce", "fmoe:16", *traces, *asked]) == 2
    assert "means nothing to fmoe:16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "paper"),
        (["gmoe"], "accepted: all, fmoe"),
        (["fmoe:77"], "accepted: 3, "),
        (["fmoe", "--list"], "--list lists all"),
        (["fmoe:16", "--trace", "nowhere"], "nowhere"),
        (["fmoe:16", "--out", "nowhere/page.md"], "not a folder"),
        (["fmoe:16", "--arrivals", "nowhere.csv"], "nowhere.csv"),
        (["fmoe:9", "--system", "lru,nothing"], "system='nothing'"),
        (["fmoe:9", "--hardware", "nothing"], "hardware='nothing'"),
        (["fmoe:9", "--memory", "nothing"], "memory='nothing'"),
        (["fmoe:9", "--fewer", "fmoe:9"], "fewer='fmoe:9'"),
        (["fmoe:start"], "fmoe:10 begins with empty stores"),
        (["my_module.PAPER"], "'my_module' cannot be imported"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str, capsys: Captured) -> None:
    assert main(["lab", "reproduce", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_result_is_refused(capsys: Captured, traces: list[str], tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}", "utf-8")
    assert main(["lab", "reproduce", "fmoe:16", *traces, "--reuse", str(tmp_path / "no.json")]) == 2
    assert "not what `expertly lab reproduce --out DIR` writes" in capsys.readouterr().err


def test_results_with_another_file_of_the_same_name_are_not_used_again(
    capsys: Captured, traces: list[str], tmp_path: Path
) -> None:
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,{},10\n2023-11-16 18:15:50.9,5,4\n"
    for folder, tokens in (("a", 6), ("b", 7)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "arrivals.csv").write_text(rows.format(tokens), "utf-8")
    given = ("fmoe:16", "--quick", *traces, "--arrivals")
    reproduce(capsys, *given, tmp_path / "a" / "arrivals.csv", "--out", tmp_path / "out")
    known = ["--reuse", str(tmp_path / "out" / "results.json")]
    reproduce(capsys, *given, tmp_path / "a" / "arrivals.csv", *known)
    assert main(["lab", "reproduce", *map(str, given), str(tmp_path / "b" / "arrivals.csv"), *known]) == 2
    assert "arrivals was" in capsys.readouterr().err


def test_without_a_trace_the_demo_model_is_recorded_once(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from expertly.lab.papers import recorded

    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path))
    monkeypatch.setitem(recorded.PROMPTS, True, 2)
    monkeypatch.setitem(recorded.NEW_TOKENS, True, 12)
    assert main(["lab", "reproduce", "moepic:6", "--quick", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "recording the demo model's answers" in err
    (one,) = json.loads(out)["results"]
    assert one["findings"][0]["trace"] == "demo-2"
    assert main(["lab", "reproduce", "moepic:6", "--quick", "--json"]) == 0
    assert "recording" not in capsys.readouterr().err


def test_the_page_has_every_experiment_of_the_list() -> None:
    page = PAGE.read_text("utf-8")
    known = {one.name: one for one in experiments()}
    assert re.findall(r"^\| \[([\w:.-]+)\]", page, re.MULTILINE) == list(known)
    behind = "".join(path.read_text("utf-8") for path in PAGE.with_suffix("").glob("*.md"))
    for one in known.values():
        assert f"## {one.name}\n\n**{one.title}.**" in behind and one.shows in behind
    failed = [line for line in behind.splitlines() if line.startswith("- ") and "**does not hold**" in line]
    assert [line for line in failed if " Why: " not in line] == []
