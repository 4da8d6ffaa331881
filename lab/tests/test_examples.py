"""The scripts of examples/ that record and simulate."""

from __future__ import annotations

from pathlib import Path

from tests.test_examples import Run, run

__all__ = ["run"]


def test_own_trace_and_what_is_simulated_of_it(run: Run, tmp_path: Path) -> None:
    message = run("own_trace.py", tmp_path / "trace", "Once upon a time", "The sea")
    assert message.startswith("2 requests, ") and message.count("\nlayer ") == 12
    rates = run("simulate_and_plot.py", tmp_path / "trace", tmp_path / "plot.png")
    assert list(simulated(rates)) == ["lru", "lfu", "Fading", "belady-global", "oracle"]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def simulated(printed: str) -> dict[str, str]:
    """Of each system, the hit rates and times by memory, as they are printed."""
    return {name.strip(): said for name, said in (line.split(":") for line in printed.strip().split("\n"))}


def test_from_a_model_to_a_plot_beside_the_bounds(run: Run, tmp_path: Path) -> None:
    result = simulated(run("simulate_and_plot.py", tmp_path / "plot.png"))
    hits = {name: int(said.split("%")[0]) for name, said in result.items()}  # with the least memory
    assert hits["belady-global"] >= max(hits["lru"], hits["lfu"], hits["Fading"]) > 0
    assert result["Fading"] not in (result["lru"], result["lfu"]), "it decides for itself"
    assert (tmp_path / "plot.png").stat().st_size > 10_000
