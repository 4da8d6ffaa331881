"""What a command of the lab cannot do is said as expertly says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.tests.sim.drive import make_trace, random_passes, sized
from tests.cli.asking import Captured, assert_refused

REFUSED = {
    "": [
        ("lab reproduce fmoe --trace a b", "before each of several values: --trace"),
        ("bench --system oracle", "system='oracle': needs to know the demands to come"),
        ("run demo x --system mixtral-offloading", "loop=synchronous is for simulation (`expertly lab simulate`)"),
    ],
    "lab compare --out out": [
        ("--system nosuch", "system='nosuch': unknown"),
        ("--system oracle", "system='oracle': needs to know the demands to come"),
        ("--memory 'a lot'", "memory='a lot': accepted are"),
        ("--memory auto", "memory='auto': budgets are compared"),
        ("--memory -1", "memory='-1'"),
        ("--requests 0", "'--requests': '0': must be a whole number from 1"),
        ("--hardware abacus", "hardware='abacus': no such profile"),
    ],
    "lab simulate TRACE": [
        ("--system nonsense", "system='nonsense': unknown; accepted: on-demand, "),
        ("--system lru,,lfu", "system='lru,,lfu': must be"),
        ("--system ''", "system='': must be"),
        ("--hardware abacus", "hardware='abacus': no such profile"),
        ("--geometry abacus", "geometry='abacus': no such geometry"),
        ("--geometry mixtral-8x7b", "geometry='mixtral-8x7b': 32 layers of 8 experts, top-2, but "),
        ("--system fmoe:colour=red", "system='fmoe:colour=red': 'colour': unknown; accepted with prediction=fmoe, "),
        ("--segments 5", "segments=5: must divide the experts' intermediate size 12; accepted up to 64: 1, 2, 3"),
        ("--segments 0", "Invalid value for '--segments': '0': must be a whole number from 1"),
        ("--memory 1%", "below the staging slots through which experts are streamed; the least is 12.50%"),
        ("--memory auto", "memory='auto': there is no machine to ask; accepted: a share"),
        ("--memory much", "memory='much': accepted are a share"),
        ("--memory 30%,", "memory='30%,': must be"),
        ("--memory 0%", "memory='0%': no memory at all"),
        ("--memory 0.25", """memory='0.25': no memory at all; accepted are a share ("25%")"""),
        ("--experts-per-layer 9", "experts_per_layer=9: must be from 0 to the 8 experts of a layer"),
        ("--experts-per-layer half", "experts_per_layer='half': must be a whole number from 0"),
        ("--experts-per-layer -1", "experts_per_layer='-1': must be a whole number from 0"),
        ("--experts-per-layer 2 --memory 10%", "experts_per_layer=2: stands instead of memory=10%"),
        ("--host-memory auto --memory 50%", "host_memory='auto': there is no machine to ask; accepted: a share"),
        ("--host-memory 1% --memory 50%", "below the staging slots through which experts are streamed; the least"),
        (
            "--host-memory 50% --hardware laptop-nvme --memory 50%",
            "'laptop-nvme' has no [disk]; accepted: one that has",
        ),
        ("--system lru:host=lfu --memory 50%", "system='lru:host=lfu': host=lfu: of no use without host_memory"),
        ("--split a:b", "Invalid value for '--split': 'a:b': must be two whole numbers from 1"),
        ("--split 7:0", "Invalid value for '--split': '7:0': must be"),
        ("--split 99:1", "split=99:1: of 4 requests, 4 to learn from and 0 to simulate"),
        ("--tokens 5 --requests 2", "requests=2, tokens=5: both limit the same"),
        ("--tokens 0", "Invalid value for '--tokens': '0': must be a whole number from 1"),
        ("--seed -1", "Invalid value for '--seed': '-1': must be"),
        ("--plot out.bmp", "plot='out.bmp': must end in .png, .svg, .pdf"),
        ("--plot /nowhere/out.png", "plot='/nowhere/out.png': '/nowhere' is not a folder"),
        ("--chrome-trace /nowhere/out.json", "chrome_trace='/nowhere/out.json': cannot be written"),
        ("--chrome-trace /tmp", "chrome_trace='/tmp': a folder"),
        ("--chrome-trace ''", "'--chrome-trace': '': must be the name of a file"),
        ("--arrivals /nowhere.csv", "/nowhere.csv: no such file"),
    ],
    "lab train TRACE": [
        ("", "Missing option '--out'"),
        ("--out no/such/folder/file", "out='no/such/folder/file': must be a file"),
        ("--out x --distances 1,0", "'1,0': must be whole numbers from 1"),
        ("--out x --distances ''", "must be whole numbers from 1"),
        ("--out x --hidden 0", "'0': must be a whole number from 1"),
        ("--out x --split 7", "'7': must be two whole numbers"),
        ("--out x --device abacus", "device='abacus': unknown, or not here"),
    ],
    "lab trace": [
        ("record MODEL --out new --prompts nowhere.jsonl", "nowhere.jsonl: cannot be read"),
        ("record MODEL --out new --prompts x --max-new-tokens 0", "'0': must be a whole number from 1"),
        ("import PIPE out", "must be an npz file"),
        ("import absent.npz out", "absent.npz: must be an npz file"),
        ("info absent", "no such folder"),
        (f"info {'x' * 300}", "File name too long"),
        (f"info {'a/' * 3000}", "File name too long"),
        ("synth out --markov 1.5", "from 0 to 1"),
        ("synth out --top-k 65", "top_k=65: must be from 1 to 64"),
        ("synth out --prefill-tokens -1", "a whole number from 0"),
    ],
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four requests of a prompt of 4 tokens and 10 steps, sizes known."""
    layers = sized(2, 8, 2)
    passes = random_passes(0, layers, 10, prompt=4, num_requests=4)
    folder = tmp_path_factory.mktemp("refused") / "trace"
    return make_trace(folder, passes, layers, num_requests=4, is_full=True).folder


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [(command, *row) for command, rows in REFUSED.items() for row in rows],
    ids=[f"{command} {words}" for command, rows in REFUSED.items() for words, _ in rows],
)
def test_refused(
    command: str,
    words: str,
    said: str,
    model: Path,
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(capsys, f"{command} {words}", said, tmp_path, MODEL=model, TRACE=trace)
