"""What a command cannot do is said in one line that names it: exit code 2, nothing on stdout, no file left behind."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from expertly.cli.inputs import is_trace
from expertly.cli.main import main
from tests.cli.asking import Captured
from tests.sim.drive import make_trace, random_passes, sized

OF_MODEL, OF_TRACE = "only of a model, and this is a trace", "only of a trace, and this is a model"
ONE_MEMORY = "accepted: one of the two"

REFUSED = {
    "": [
        ("nonsense", "No such command 'nonsense'"),
        ("lab systems --nonsense", "No such option: --nonsense"),
        ("generate", "Missing option '--prompt'"),
        ("generate --prompt x --top-p 2", "'2': must be above 0 and at most 1"),
        ("lab reproduce fmoe --trace a b", "before each of several values: --trace"),
    ],
    "run MODEL Hi": [
        ("--system nonsense", "system='nonsense': unknown; accepted: auto, on-demand, lru"),
        ("--device nonsense", "device='nonsense': unknown; accepted: cpu"),
        ("--dtype int3", "dtype='int3'"),
        ("--memory lots", "memory='lots': accepted are a share"),
        ("--memory 100", "the least that works is"),
        ("--memory 50% --segments 3", "segments=3: must divide the experts' intermediate size 16"),
        ("--max-new-tokens 0", "'--max-new-tokens': '0': must be a whole number from 1"),
        ("--order nonsense", "order='nonsense': unknown; accepted: resident"),
        ("--codec zip", "codec='zip': unknown; accepted: none, planes, auto"),
        ("--system lru --learned my.maps", "system 'lru' learns nothing that is kept"),
        ("--predict fast", "accepted: auto, thread, inline"),
        ("--system fmoe --learned no/my.maps", "in a folder that exists"),
        ("--devices cpu:0,cpu:1 --device cpu", ONE_MEMORY),
        ("--devices cpu:0,tpu", "devices='tpu': unknown; accepted: cpu, cuda, cuda:N"),
        (f"--devices {','.join(f'cpu:{i}' for i in range(9))}", "9 of them, but a layer has only 8 experts"),
        ("--speculate medusa", "'--speculate': 'medusa': must be off or prompt-lookup"),
    ],
    "run MODEL": [("''", "prompt")],
    "pack": [
        ("", "nothing to pack; accepted: MODEL"),
        ("./absent", "no such folder"),
        ("someone/absent", "the hub cannot be reached"),
        ("--list x", "not accepted with --list"),
        ("--list --codec planes", "not accepted with --list"),
        ("--remove x --dtype float16", "not accepted with --remove"),
        ("--list --remove x", "--list and --remove: accepted: one"),
        ("--verify /absent", "no such folder"),
        ("--verify /", "not a packed store"),
        ("x --dtype NaN", "dtype='NaN'"),
        ("x --codec zip", "codec='zip': unknown; accepted: none, planes, auto"),
    ],
    "doctor": [
        ("--workers 2", "workers=2: only with a MODEL to forecast"),
        ("demo --workers 2,4 --hardware-out x.toml", "workers=2,4: only with a MODEL to forecast"),
        ("demo --workers 40", "workers=40: accepted: 1 to 31, for a layer has 32 experts"),
        ("demo --workers two", "'two': must be whole numbers from 1 to 4096 with commas between"),
        ("demo --network 1GbE", "network='1GbE': accepted: only with --workers N"),
        ("demo --workers 2 --network wifi", "network='wifi': no such network"),
        ("demo --segments 2", "segments=2: only with a MODEL that is measured into --hardware-out"),
        ("--hardware-out x.toml --memory 25%", "memory='25%': only with a MODEL"),
        ("--segments 2", "segments=2: only with a MODEL"),
        ("--total-memory 1GiB", "only with a MODEL"),
        ("--dir nowhere", "dir='nowhere': not a folder"),
    ],
    "tune MODEL": [
        ("--memory lots", "memory='lots'"),
        ("--total-memory lots", "total_memory='lots'"),
        ("--memory 25% --total-memory 1GiB", ONE_MEMORY),
        ("--memory 1", "memory=1"),
        ("--prompts /nowhere/prompts.jsonl", "prompts /nowhere/prompts.jsonl: cannot be read"),
        ("--out /nowhere/out.json", "out='/nowhere/out.json': must be a file"),
        ("--dtype int8", "dtype='int8'"),
        ("--time-limit 0s", "'--time-limit': '0s': must be from 1 second to a day"),
        ("--requests 1", "1 of 1 can be given to this model; accepted: at least 2"),
        ("--device tpu", "device='tpu'"),
        ("--predictor /nowhere/weights", "predictor='/nowhere/weights': no such file"),
        ("--codec zip", "codec='zip'"),
    ],
    "bench": [
        ("--memory 25% --total-memory 1GiB", "memory='25%' and total_memory='1GiB'"),
        ("--total-memory lots", "total_memory='lots'"),
    ],
    "lab compare --out out": [
        ("--geometry gpt-oss-20b", "geometry='gpt-oss-20b': of no use with a model; accepted with a trace"),
        ("TRACE --system nosuch", "system='nosuch': unknown"),
        ("TRACE --system lru,", "system='lru,': must be one or more"),
        ("TRACE --system oracle", "system='oracle': needs to know the demands to come"),
        ("TRACE --memory 'a lot'", "memory='a lot': accepted are"),
        ("TRACE --memory auto", "memory='auto': budgets are compared"),
        ("TRACE --memory 1%", "memory='1%': below the staging slots"),
        ("TRACE --rounds 2", "rounds=2: of no use with a trace"),
        ("TRACE --prompts x.jsonl", "prompts='x.jsonl': of no use with a trace"),
        ("TRACE --requests 0", "'--requests': '0': must be a whole number from 1"),
        ("TRACE --hardware abacus", "hardware='abacus': no such profile"),
        ("TRACE --codec zip", "codec='zip': unknown"),
        ("TRACE --split 9", "'9': must be two whole numbers"),
        ("TRACE --predictor nowhere", "predictor='nowhere': no system of"),
        ("TRACE --system promoe --predictor nowhere", "nowhere"),
        ("TRACE --system moepic --plan nowhere", "nowhere: no such file"),
        ("TRACE --plan nowhere --system lru", "plan='nowhere': no system of lru"),
    ],
    "lab simulate TRACE": [
        ("--codec zip", "codec='zip': unknown; accepted: none, planes"),
        ("--codec planes", "codec='planes': on hardware 'rtx3090' all experts lie decoded in host memory"),
        ("--system nonsense", "system='nonsense': unknown; accepted: on-demand, "),
        ("--system lru,,lfu", "system='lru,,lfu': must be"),
        ("--system ''", "system='': must be"),
        ("--hardware abacus", "hardware='abacus': no such profile"),
        ("--geometry abacus", "geometry='abacus': no such geometry"),
        ("--geometry mixtral-8x7b", "geometry='mixtral-8x7b': 32 layers of 8 experts, top-2, but "),
        ("--order size", "order='size': unknown; accepted: resident, id"),
        ("--predict psychic", "Invalid value for '--predict': 'psychic': must be virtual or inline"),
        ("--system fmoe:colour=red", "system='fmoe:colour=red': 'colour': unknown; accepted with prediction=fmoe: "),
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
        ("--chrome-trace ''", "chrome_trace='': must be the name of a file"),
        ("--arrivals /nowhere.csv", "arrivals /nowhere.csv: cannot be read"),
    ],
    "lab configure TRACE": [
        ("--memory 1%", "below the staging slots through which experts are streamed"),
        ("--memory auto", "there is no machine to ask"),
        ("--memory 10%,", "must be one or more, with commas between"),
        ("--segments 7", "must divide the experts' intermediate size 12"),
        ("--zeta 1", "must be above 0 and below 1"),
        ("--seed 1", "shuffles for --split, which is not given"),
        ("--prompt hello", OF_MODEL),
        ("--seconds 1", OF_MODEL),
        ("--total-memory 1GiB", OF_MODEL),
        ("--raw", OF_MODEL),
        ("--hardware none-such", "no such profile and no such file"),
        ("--out no/plan.json", "must be a file, in a folder that exists and is writable"),
        ("--out plan.json --memory 40%,60%", "holds the plan of one memory"),
    ],
    "lab configure MODEL": [
        ("--geometry gpt-oss-20b", OF_TRACE),
        ("--split 7:3", OF_TRACE),
        ("--memory auto,25%", "'auto' is what is free here"),
        ("--memory 25% --total-memory 1GiB", ONE_MEMORY),
        ("--seconds 2 --hardware rtx3090", "nothing is measured"),
        ("--memory 1%", "below the staging slots"),
        ("--prompt ''", "gives 0 tokens; write at least one word"),
        ("--prompt caf\udce9", "must be UTF-8"),
        ("--memory 100% --seconds 0 --tokens 4", "or name a profile of this machine (--hardware)"),
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
        ("import PIPE out", "must be an npz file"),
        ("import --format csv law.npz out", "npz is the only format"),
        ("import absent.npz out", "absent.npz: must be an npz file"),
        ("info absent", "no such folder"),
        ("info absent --plot a.bmp", "must end in .png, .svg, .pdf"),
        ("info absent --plot no/a.png", "is not a folder"),
        ("synth out --markov 1.5", "from 0 to 1"),
        ("synth out --top-k 65", "top_k=65: must be from 1 to 64"),
        ("synth out --tokens 60 --phases 61", "phases=61"),
        ("synth out --prefill-tokens -1", "a whole number from 0"),
        ("synth out --lookahead 1.5", "'1.5': must be from 0 to 1"),
        ("synth out --lookahead 0.9 --top-k 40", "lookahead=0.9: of 64 experts, top-40, too few are not needed"),
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
    os.mkfifo(tmp_path / "PIPE")  # which nobody writes to: reading it would never end
    places = {"MODEL": str(model), "TRACE": str(trace)}
    typed = [places.get(word, word) for word in shlex.split(f"{command} {words}")]
    assert main(typed) == 2
    out, err = capsys.readouterr()
    *messages, error = err.splitlines()
    assert out == "" and said in error.removeprefix("expertly: error: ") != error, err
    assert all(line.startswith("expertly: ") for line in messages)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "command.txt"]


def test_a_folder_whose_manifest_is_a_pipe_is_no_trace(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    assert not is_trace(str(tmp_path))
