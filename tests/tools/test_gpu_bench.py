"""bench/gpu.py keeps what it has measured, whatever one row does to the process that measures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"

pytestmark = pytest.mark.timeout(120)

STUB = """
import json, os, sys, time
given = json.loads(sys.argv[2])
for job in given["jobs"]:
    system = job["system"]
    if system == "dies":
        os.abort()
    if system == "hangs":
        time.sleep(600)
    answer = {"error": "out of memory"} if system == "fails" else {"tpot_s": 2.0 if system == "resident" else 3.0}
    print(json.dumps(answer), flush=True)
    if "error" in answer:
        sys.exit(1)
"""


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu

    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    monkeypatch.setattr(gpu, "__file__", str(stub))
    monkeypatch.setattr(gpu, "ROW_S", 4.0)  # the others are done by then, on a busy machine too
    return gpu


def test_a_row_that_fails_costs_itself(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systems, out = ("resident", "dies", "lru", "fails", "hangs", "expertly"), tmp_path / "out.json"
    todo = [{"system": one, "memory": "100%", "model": "bfloat16"} for one in systems]
    monkeypatch.setattr(gpu, "jobs", lambda device: todo)
    written, write = [], gpu.write_report

    def note(*report: Any) -> None:
        write(*report)
        written.append(len(json.loads(out.read_text())["results"]))

    monkeypatch.setattr(gpu, "write_report", note)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--seconds", "60", "--out", str(out)])
    gpu.main()
    rows = json.loads(out.read_text())["results"]
    assert [(row["system"], row.get("against_resident"), row.get("error")) for row in rows] == [
        ("resident", 1.0, None),
        ("dies", None, "exit -6"),
        ("lru", 1.5, None),
        ("fails", None, "out of memory"),
        ("hangs", None, "not done in 4 s"),
        ("expertly", 1.5, None),
    ]
    assert written == [1, 2, 3, 4, 5, 6], "after each row"


def test_what_the_time_does_not_suffice_for_is_named(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(gpu, "jobs", lambda device: [{"system": "hangs"}, {"system": "lru", "memory": "50%"}])
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--seconds", "0.5", "--out", str(out)])
    gpu.main()
    report = json.loads(out.read_text())
    assert [row["error"] for row in report["results"]] == ["not done in 1 s"]
    assert report["settings"]["left_out"] == ["lru, 50%"]
