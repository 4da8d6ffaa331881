"""`expertly lab trace info`, `import` and `synth`: what they print, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from expertly_lab.trace.reader import Trace
from lab.tests.trace.builders import iterations, write_partial
from tests.cli.asking import answer, refusal, told

SYNTH = ["--layers", "2", "--experts", "8", "--top-k", "2", "--tokens", "60"]


def npz(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((30, 2, 8)), axis=-1)[..., :2].astype(np.uint8)
    np.savez(folder / "law.npz", experts=experts, seq_len=np.array([10, 20]), token_index=np.arange(30))
    return folder / "law.npz"


def test_import_then_info(tmp_path, capsys):
    out = tmp_path / "trace"
    line = told(capsys, "lab", "trace", "import", str(npz(tmp_path)), str(out), "--model", "mine")
    assert "mine | 2 layers of 8 experts, top-2 | 2 requests | 30 iterations | 30 tokens" in line and "complete" in line
    assert "not empty" in refusal(capsys, "lab", "trace", "import", tmp_path / "law.npz", out)
    facts = answer(capsys, "lab", "trace", "info", str(out))
    assert (facts["model"], facts["complete"], facts["requests"], facts["rows"]) == ("mine", True, 2, 30)
    assert (facts["num_layers"], facts["num_experts"], facts["top_k"]) == (2, [8, 8], [2, 2])
    assert (facts["prefill_rows"], facts["expert_bytes"]) == (0, [None, None])
    assert facts["bytes"] == sum(path.stat().st_size for path in out.iterdir())
    assert facts["fields"]["embedding"] == {
        "dtype": "float16", "shape": [64], "real": False, "stored": False,
        "note": "not recorded: a fixed random vector for each token id",
    }  # fmt: skip


def test_info_of_a_recording_that_was_cut_off(tmp_path, capsys):
    write_partial(tmp_path / "trace", iterations([3, 1, 1, 6, 1]))
    out = told(capsys, "lab", "trace", "info", str(tmp_path / "trace"))
    assert "partial: the recording did not end" in out
    assert "9 tokens of prefill, 3 of decode" in out
    facts = answer(capsys, "lab", "trace", "info", str(tmp_path / "trace"))
    assert (facts["complete"], facts["iterations"], facts["categories"]) == (False, 5, {"code": 1})
    assert facts["num_experts"] == [8, 6, 8]


def test_synth_writes_what_was_asked_for(tmp_path, capsys):
    words = (*SYNTH, "--requests", 3, "--prefill-tokens", 5, "--zipf", 1.5, "--markov", 0.5, "--seed", 7)
    facts, _ = (answer(capsys, "lab", "trace", "synth", tmp_path / name, *words) for name in ("a", "b"))
    assert (facts["rows"], facts["iterations"], facts["requests"]) == (60, 48, 3)
    assert not any(field["real"] for field in facts["fields"].values())
    each, other = Trace.open(tmp_path / "a"), Trace.open(tmp_path / "b")
    np.testing.assert_array_equal(each.rows("experts", 0, 60), other.rows("experts", 0, 60))
