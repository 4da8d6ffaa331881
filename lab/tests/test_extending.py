"""docs/extending.md and docs/experiments.md, done as they say; and what is not as they say."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from expertly.api import unload
from expertly.cli.main import main
from expertly.serve.server import open_server
from expertly.serve.settings import ServeOptions
from lab.tests.sim.drive import make_trace, random_passes, sized
from tests.commands import RunningCommand
from tests.serve.conftest import greedy, running

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in ("extending.md", "experiments.md"))
LAYERS = sized(3, 8, 2)
FOLLOW = """
from expertly_lab.papers.experiment import Experiment, Paper
from expertly_lab.papers.judge import HITS, Better
from my_trained import Followers

SYSTEMS = {"follow": "lru:prediction=my_trained.Follow", "lru": "lru"}
CLAIMS = [Better("it hits more", HITS, "follow")]
PAPER = Paper("my-follow", "What follows", [Experiment("1", "Alone", "-", CLAIMS, SYSTEMS, weights=(Followers,))])
"""


def blocks(kind: str) -> list[str]:
    """The pages' code blocks that begin with this."""
    return re.findall(rf"^```{re.escape(kind)}\n(.*?)^```$", PAGES, re.DOTALL | re.MULTILINE)


def files() -> dict[str, str]:
    return dict(re.findall(r'^```python title="(\S+)"\n(.*?)^```$', PAGES, re.DOTALL | re.MULTILINE))


def commands(kind: str = "sh") -> list[list[str]]:
    return [shlex.split(line) for block in blocks(kind) for line in block.splitlines()]


def call(folder: Path, *command: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `expertly`, as it is installed, or Python: where what is imported when is what is asked."""
    programs = {"expertly": str(Path(sys.executable).with_name("expertly")), "python": sys.executable}
    environment = os.environ | ({} if path is None else {"PYTHONPATH": str(path)})
    words = [programs[command[0]], *command[1:]]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


@dataclass(frozen=True)
class Printed:
    code: int
    out: str
    err: str

    def rows(self) -> dict[str, dict[str, object]]:
        assert self.code == 0, self.err
        return {row["system"]: row for row in json.loads(self.out)["results"]}


Expertly = Callable[..., Printed]


@pytest.fixture
def expertly(start: Callable[..., RunningCommand], folder: Path, installed: Path) -> Expertly:
    """Runs a command in `folder`, where what is `installed` can be imported."""

    def run(*words: str) -> Printed:
        running = start(*words, folder=folder, path=installed)
        return Printed(running.exit_code(200), running.out, running.err)

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the page's files and a TRACE."""
    for name, text in files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    passes = random_passes(0, LAYERS, 40, prompt=3, num_requests=2)
    make_trace(tmp_path / "TRACE", passes, LAYERS, num_requests=2)
    return tmp_path


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The current folder is `folder`, for commands that this process runs; what they import of it is forgotten."""
    monkeypatch.chdir(folder)
    yield
    for name in files():
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.fixture
def installed(folder: Path) -> Path:
    """A folder for Python's path with the same as an installed distribution."""
    result = folder / "site"
    result.mkdir()
    for name in files():
        (folder / name).rename(result / name)
    groups: dict[str, str] = dict(re.findall(r'entry-points\."([\w.]+)"\]\n((?:[\w-]+ = ".*"\n)+)', PAGES))
    assert len(groups) == 6
    install(result, "mine", {group: lines.replace('"', "") for group, lines in groups.items()})
    return result


def install(path: Path, name: str, groups: dict[str, str]) -> None:
    """What pip leaves of a distribution."""
    information = path / f"{name}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    text = "".join(f"[{group}]\n{lines}\n" for group, lines in groups.items())
    (information / "entry_points.txt").write_text(text, encoding="utf-8")


def test_what_the_pages_say_to_run_runs(folder: Path, here: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert [command[1] for command in commands()] == ["lab", "run", "lab", "run", "-m", "lab"]
    *ours, checks, experiment = commands()
    for _, *command in ours:
        assert main(command) == 0, command
        (system,) = [each for each in command[command.index("--system") + 1].split(",") if "my_" in each]
        assert system in "".join(capsys.readouterr())
    assert main(experiment[1:]) == 0
    out = capsys.readouterr().out
    assert "my_paper.PAPER:1  Fading beside LRU" in out and "] it hits more" in out and "in the paper +10%" in out
    assert (folder / "mine.png").stat().st_size > 1000
    assert "2 passed" in call(folder, *checks).stdout


def test_the_policies_of_the_page_decide(folder: Path) -> None:
    """They are not LRU under another name, and options reach the predictor."""
    again = "lru:prediction=my_predictor.Again"
    (folder / "random.py").write_text('raise RuntimeError("stands in for a library")', encoding="utf-8")
    systems = ["lru", "lru:eviction=my_policies.Fading", again, f"{again}:width=1"]
    words = ("lab", "simulate", "TRACE", "--system", ",".join(systems), "--memory", "40%", "--json")
    done = call(folder, "expertly", *words)
    result = Printed(done.returncode, done.stdout, done.stderr).rows()
    hits = [result[system]["hit_rate"] for system in systems]
    assert hits[0] != hits[1]
    assert result[again]["recall"] > result[f"{again}:width=1"]["recall"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_policy_of_the_page_is_compared_and_served(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(folder)  # processes that this one starts are not in the current folder
    system = "lru:eviction=my_policies.Fading"
    few = "--memory 25% --requests 1 --tokens 12 --rounds 1 --json"
    assert main(["lab", "compare", "--system", system, "--out", "compared", *few.split()]) == 0
    (row,) = [row for row in json.loads(capsys.readouterr().out)["rows"] if row["system"] == system]
    assert 0 < row["engine"]["hit_rate"] == row["simulated"]["hit_rate"] < 1
    options = ServeOptions(
        served_model_name="demo", system=system, memory="25%", dtype="float32", device="cpu", context=128
    )
    assembled = open_server(options)
    with running(assembled) as serving:
        (message,) = serving.client.models.list().data
        assert message.model_dump()["expertly"]["system"] == system
        text = serving.complete("Once upon a time", 8).choices[0].text
    assert text == greedy(assembled.model, assembled.service.prompts.tokenizer, "Once upon a time", 8)
    unload(assembled.model)


def test_a_predictor_that_was_trained_runs_in_simulator_reproduce_and_engine(
    folder: Path, here: None, start: Callable[..., RunningCommand], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f'{{"prompt": "Once upon a time there was {who}"}}\n' for who in ("a fox", "a king", "a ship", "the sea")]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    record, train, *runs = commands('sh title="with prompts.jsonl"')
    assert main(record[1:]) == 0
    assert start(folder / train[1], *train[2:], folder=folder).exit_code(200) == 0
    capsys.readouterr()
    result = []
    for _, *command in runs:
        assert main([*command, "--json"]) == 0
        result.append(json.loads(capsys.readouterr().out))
    simulated, run = result
    rows = {row["system"]: row for row in simulated["results"]}
    assert rows["lru:prediction=my_trained.Follow"]["recall"] > 0.3, "by chance it is an eighth"
    assert any("predictor" in note for note in simulated["notes"])
    assert run["phases"]["decode"]["predicted"] > 0
    (folder / "my_follow.py").write_text(FOLLOW, encoding="utf-8")
    asked = "lab reproduce my_follow.PAPER --trace seen --quick --predictor mine.followers --json"
    assert main(asked.split()) == 0
    (finding,) = json.loads(capsys.readouterr().out)["results"][0]["findings"]
    cells = {cell["system"]: cell["values"]["hit rate"][0] for cell in finding["cells"]}
    assert cells["follow"] > cells["lru"]
    without = runs[-1][1 : runs[-1].index("--predictor")]
    assert main(without) == 2
    assert "my_trained.Follow: no weights; name their file" in capsys.readouterr().err


def test_an_installed_package_brings_names(expertly: Expertly) -> None:
    for _, *command in commands('sh title="with the package installed"'):
        done = expertly(*command)
        assert done.code == 0 and done.err == "", done.err
        assert re.search("fading-paper:1|fading-again|32 experts a layer, 98304 bytes each", done.out)
    listed = json.loads(expertly("systems", "--json").out)
    assert listed["parts"]["eviction"][-1] == "fading" and listed["parts"]["prediction"][-1] == "again"
    assert listed["systems"][-1]["name"] == "fading-again" and listed["options"]["prediction=again"] == ["width"]
    generate = "run demo Once --memory 25% --max-new-tokens 3 --json --system fading-again:width=2"
    done = expertly(*generate.split())
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["system"] == "fading-again:width=2" and result["phases"]["decode"]["predicted"] > 0


def test_nothing_outside_is_read_before_it_is_asked_for(expertly: Expertly, folder: Path, installed: Path) -> None:
    (installed / "loud.py").write_text('print("loud was read")\n', encoding="utf-8")
    groups = ("evictions", "predictors", "prefetches", "allocations", "systems", "papers")
    install(installed, "loud", {f"expertly.{group}": "loud = loud:X" for group in groups})
    assert "loud was read" not in expertly("lab", "simulate", "--help").out
    done = expertly("lab", "simulate", "TRACE", "--memory", "40%", "--system", "fmoe,lru:prediction=counts")
    assert done.code == 0 and "loud was read" not in done.out
    code = "import expertly, expertly.scheduler.systems, expertly_lab.sim.study, expertly.testing"
    assert call(folder, "python", "-c", code, path=installed).stdout == ""
    assert expertly("systems").out.startswith("loud was read\n")
