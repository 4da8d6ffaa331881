"""`expertly lab trace info`, `import`, `synth` and `replay`: what they print, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from expertly.cli.main import main
from expertly.trace.reader import Trace
from tests.cli.asking import Captured, answer, refusal, told
from tests.cli.test_simulate import geometry_file
from tests.scheduler.test_decisions import record
from tests.trace.builders import iterations, write_partial, write_trace

SYNTH = ["--layers", "2", "--experts", "8", "--top-k", "2", "--tokens", "60"]


def npz(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((30, 2, 8)), axis=-1)[..., :2].astype(np.uint8)
    np.savez(folder / "law.npz", experts=experts, seq_len=np.array([10, 20]), token_index=np.arange(30))
    return folder / "law.npz"


def test_import_then_info(tmp_path, capsys):
    out = tmp_path / "trace"
    line = told(capsys, "lab", "trace", "import", str(npz(tmp_path)), str(out))
    assert "law | 2 layers of 8 experts, top-2 | 2 requests | 30 iterations | 30 tokens" in line and "complete" in line
    assert "not empty" in refusal(capsys, "lab", "trace", "import", tmp_path / "law.npz", out)
    facts = answer(capsys, "lab", "trace", "info", str(out))
    assert (facts["model"], facts["complete"], facts["requests"], facts["rows"]) == ("law", True, 2, 30)
    assert (facts["num_layers"], facts["num_experts"], facts["top_k"]) == (2, [8, 8], [2, 2])
    assert (facts["decode_tokens"], facts["prefill_tokens"], facts["expert_bytes"]) == (30, 0, [None, None])
    assert facts["bytes"] == sum(path.stat().st_size for path in out.iterdir())
    assert facts["fields"]["embedding"] == {
        "dtype": "float16", "shape": [64], "real": False, "stored": False,
        "note": "not recorded: a fixed random vector for each token id",
    }  # fmt: skip
    assert len(facts["layers"]) == 2 and facts["mean"]["token_entropy_bits"] == 1
    assert 2 < facts["layers"][0]["request_entropy_bits"] <= facts["layers"][0]["max_entropy_bits"] == 3


def test_import_takes_a_model_and_a_number_of_experts(tmp_path, capsys):
    words = (npz(tmp_path), tmp_path / "trace", "--model", "mine", "--num-experts", 12)
    facts = answer(capsys, "lab", "trace", "import", *words)
    assert (facts["model"], facts["num_experts"]) == ("mine", [12, 12])


def test_info_of_a_recording_that_was_cut_off(tmp_path, capsys):
    write_partial(tmp_path / "trace", iterations([3, 1, 1, 6, 1]))
    out = told(capsys, "lab", "trace", "info", str(tmp_path / "trace"))
    assert "partial: the recording did not end" in out
    assert "9 tokens of prefill in 2 iterations, 3 of decode" in out
    tables = out.partition("experts serve:")[2].partition("entropy of")[0].splitlines()
    assert len(tables) > 10 and max(map(len, tables)) <= 80, "for a terminal"
    facts = answer(capsys, "lab", "trace", "info", str(tmp_path / "trace"))
    assert (facts["complete"], facts["iterations"], facts["categories"]) == (False, 5, {"code": 1})
    assert facts["num_experts"] == [8, 6, 8]


def test_info_names_what_is_damaged(tmp_path, capsys):
    write_trace(tmp_path / "trace", iterations([3, 1, 1]))
    shard = tmp_path / "trace" / "rows-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard}: truncated" in refusal(capsys, "lab", "trace", "info", tmp_path / "trace")


def test_info_draws(tmp_path, capsys):
    info, plot = ("lab", "trace", "info", tmp_path / "trace", "--plot"), tmp_path / "a.png"
    answer(capsys, "lab", "trace", "synth", tmp_path / "trace", *SYNTH)
    assert main([*map(str, info), str(plot)]) == 0
    assert f"plot written to {plot}" in capsys.readouterr().err
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and plot.stat().st_size > 20_000
    write_trace(tmp_path / "one", iterations([1]))
    answer(capsys, "lab", "trace", "info", tmp_path / "one", "--plot", tmp_path / "b.svg")


def test_synth_writes_what_was_asked_for(tmp_path, capsys):
    words = (*SYNTH, "--requests", 3, "--prefill-tokens", 5, "--zipf", 1.5, "--markov", 0.5, "--phases", 2, "--seed", 7)
    facts, _ = (answer(capsys, "lab", "trace", "synth", tmp_path / name, *words) for name in ("a", "b"))
    assert (facts["rows"], facts["iterations"], facts["requests"]) == (60, 48, 3)
    assert not any(field["real"] for field in facts["fields"].values())
    one, other = Trace.open(tmp_path / "a"), Trace.open(tmp_path / "b")
    np.testing.assert_array_equal(one.rows("experts", 0, 60), other.rows("experts", 0, 60))


DEEP = ["--layers", "6", "--experts", "8", "--top-k", "2"]
DEEP += ["--tokens", "240", "--requests", "4", "--prefill-tokens", "5"]


def test_a_system_that_looks_ahead_is_right_as_often_as_stated(tmp_path, capsys):
    trace, half = tmp_path / "trace", "moepic:allocation=split"
    answer(capsys, "lab", "trace", "synth", trace, *DEEP, "--lookahead", "0.8")

    def simulated(systems):
        words = ("--geometry", geometry_file(tmp_path, num_layers=6, hidden_size=64, intermediate_size=64))
        return answer(capsys, "lab", "simulate", trace, *words, "--memory", "50%", "--system", systems)

    facts = simulated(f"lru:prediction=lookahead,adapmoe,moepic,{half},lru")
    rows = {row["system"]: row for row in facts["results"]}
    assert all(row["skipped"] is None for row in rows.values())
    assert rows["lru:prediction=lookahead"]["prediction_accuracy"] == pytest.approx(0.8, abs=0.03)
    assert all(rows[name]["prefetched_bytes"] > 0 for name in ("adapmoe", "moepic", half))
    assert rows[half]["partial_hit_rate"] > 0
    note = "lookahead: modelled: 0.8 of the K best of the next layer are needed; nothing of the next token"
    assert note in facts["notes"] and not any("modelled" in note for note in simulated("lru")["notes"])


def test_the_same_decisions_are_said_to_be_so(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "d.jsonl"
    record(path, iterations=20)
    assert main(["lab", "trace", "replay", str(path)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("system lru, P = 2: 20 iterations, 60 layers, ")
    assert said.out.endswith("all decisions identical\n") and not said.err
    found = answer(capsys, "lab", "trace", "replay", str(path))
    assert (found["system"], found["segments"], found["identical"]) == ("lru", 2, True)
    assert (found["iterations"], found["layers"]) == (20, 60)
    assert found["calls"] == len(path.read_text().splitlines()) - 2, "all but the header and the end"


def test_a_changed_decision_ends_with_2_and_names_file_and_line(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "d.jsonl"
    record(path)
    path.write_text(path.read_text().replace('true,"', 'false,"', 1))
    error = refusal(capsys, "lab", "trace", "replay", path)
    assert "d.jsonl, line " in error and "checksum" in error
