"""`expertly run` with a prompt, from the command line to the text, on a tiny random model without a chat template."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from expertly.cli.main import main
from tests.cli.asking import Captured, answer, refusal
from tests.commands import RunningCommand
from tests.families import fill_with_nan, make_checkpoint, make_tokenizer, reference_generate

PROMPT = "Once upon a time"
KEYS = {
    "text", "tokens", "ttft_s", "tpot_s", "hit_rate", "stall_s", "bytes_loaded", "expert_bytes", "memory_bytes",
    "peak_rss_bytes", "system", "segments",
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    """What the unmodified model writes."""
    tokenizer = make_tokenizer()
    tokens = reference_generate(model, [tokenizer(PROMPT)["input_ids"]], max_new_tokens=20)[0]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def run(model: Path, *arguments: str, prompt: str = PROMPT) -> int:
    return main(["run", str(model), prompt, "--raw", "--max-new-tokens", "20", *arguments])


@pytest.mark.parametrize(
    "arguments", [("--system", "lfu"), ("--segments", "4"), ("--system", "on-demand", "--staging-slots", "2")]
)
def test_json_is_one_object_with_the_same_text(
    model: Path, expected: str, arguments: tuple[str, ...], capsys: Captured
):
    assert run(model, "--memory", "50%", "--json", *arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert result.keys() >= KEYS
    assert result["text"] == expected
    assert result["tokens"] == 20
    assert 0 < result["memory_bytes"] <= result["expert_bytes"] / 2
    assert result["ttft_s"] > 0 and result["tpot_s"] > 0
    assert 0 <= result["hit_rate"] <= 1
    assert result["peak_rss_bytes"] > 50 << 20
    assert "layers" not in result


def test_generate_is_run_as_it_was_called_before(model: Path, expected: str, capsys: Captured):
    words = ("generate", model, "--prompt", PROMPT, "--max-new-tokens", "20", "--matcher", "auto", "--maps", "off")
    assert answer(capsys, *words)["text"] == expected


def test_stats_adds_a_table_by_layer_and_phase(model: Path, capsys: Captured):
    assert run(model, "--memory", "50%", "--stats") == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.split()[1:2] == ["decode"]]
    assert rows == [["0", "decode"], ["1", "decode"], ["2", "decode"], ["all", "decode"]]
    assert run(model, "--memory", "50%", "--stats", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [layer["layer"] for layer in result["layers"]] == [0, 1, 2]
    assert sum(layer["decode"]["misses"] for layer in result["layers"]) == result["phases"]["decode"]["misses"]


def test_several_devices_write_the_same_and_are_told_apart(model: Path, expected: str, capsys: Captured):
    arguments = ("--memory", "60%", "--devices", "cpu:0,cpu:1", "--stats")
    assert run(model, *arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == expected and [one["device"] for one in result["devices"]] == ["cpu:0", "cpu:1"]
    assert result["bytes_loaded"] == sum(one["bytes_loaded"] for one in result["devices"])
    assert run(model, *arguments) == 0
    out = capsys.readouterr().out
    assert sum(line.startswith("cpu:") for line in out.splitlines()) == 4, "a table by device"


def test_shares_that_are_not_equal_are_shown(model: Path, capsys: Captured):
    system = "lru:allocation=adapmoe"
    assert run(model, "--memory", "50%", "--system", system, "--stats", "--max-new-tokens", "3") == 0
    assert "[experts kept by layer 3 3 3 | allocation adapmoe | learned online, from 2 decoded tokens | moves 0]" in (
        capsys.readouterr().out
    )


def test_compressed_experts_say_what_they_save_and_cost(model: Path, expected: str, capsys: Captured):
    arguments = ("--memory", "75%", "--codec", "planes", "--stats")
    assert run(model, *arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith(expected.rstrip("\n"))
    (line,) = (line for line in out.splitlines() if line.startswith("[codec planes: it was asked for | stored in "))
    for words in ("decoded ", " of processor time", "read "):
        assert words in line
    assert "threads that compute beside decoders: " in line
    assert run(model, *arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == expected
    assert result["codec"]["name"] == "planes" and 0 < result["codec"]["ratio"] < 1
    assert min(result[key] for key in ("bytes_disk", "bytes_decoded", "decode_s")) > 0
    assert run(model, "--memory", "75%", "--codec", "none", "--stats") == 0
    assert "\n[codec none: it was asked for | read " in capsys.readouterr().out


def test_sampling_repeats_with_the_seed(model: Path, expected: str, capsys: Captured):
    texts = []
    for seed in ("1", "1", "2"):
        assert run(model, "--memory", "50%", "--temperature", "2", "--seed", seed, "--json") == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]
    assert len({*texts, expected}) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--system", "nonsense"), ("system", "nonsense", "lru")),
        (("--device", "nonsense"), ("device", "nonsense", "cpu")),
        (("--dtype", "int3"), ("dtype", "int3", "bfloat16")),
        (("--memory", "lots"), ("memory", "lots", "25%")),
        (("--memory", "100"), ("memory", "least")),
        (("--memory", "50%", "--segments", "3"), ("segments=3", "16")),
        (("--max-new-tokens", "0"), ("--max-new-tokens", "0", "from 1")),
        (("--order", "nonsense"), ("order", "nonsense", "resident")),
        (("--codec", "zip"), ("codec='zip'", "none, planes, auto")),
        (("--learned", "my.maps"), ("system 'lru' learns nothing that is kept",)),
        (("--predict", "fast"), ("accepted: auto, thread, inline",)),
        (("--system", "fmoe", "--learned", "no/my.maps"), ("in a folder that exists",)),
        (("--devices", "cpu:0,cpu:1", "--device", "cpu"), ("accepted: one of the two",)),
        (("--devices", "cpu:0,tpu"), ("devices='tpu': unknown; accepted: cpu, cuda, cuda:N",)),
        (("--devices", ",".join(f"cpu:{i}" for i in range(9))), ("9 of them, but a layer has only 8 experts",)),
    ],
)
def test_bad_settings_name_themselves(
    model: Path, arguments: tuple[str, ...], words: tuple[str, ...], capsys: Captured
):
    error = refusal(capsys, "run", model, PROMPT, "--raw", *arguments).splitlines()[-1]
    for word in words:
        assert word in error


def test_nan_in_the_weights_is_told_with_its_layer(tmp_path: Path, capsys: Captured):
    folder = make_checkpoint("qwen3_moe", tmp_path / "model", tokenizer=True)
    fill_with_nan(folder, "model.layers.1.mlp.experts")
    error = refusal(capsys, "run", folder, PROMPT, "--raw", "--memory", "50%")
    assert error.startswith("the experts of MoE layer 1 gave NaN: the checkpoint's weights hold NaN, or numbers grow")


@pytest.mark.slow
def test_a_prompt_from_stdin(model: Path, expected: str, start: Callable[..., RunningCommand], tmp_path: Path):
    (tmp_path / "prompt").write_text(PROMPT)
    words = ("run", model, "-", "--memory", "50%", "--max-new-tokens", "20", "--raw")
    running = start(*words, stdin=tmp_path / "prompt")
    assert running.exit_code(60) == 0
    assert running.out.startswith(expected) and running.err == "", "progress and advice are for terminals"


@pytest.mark.slow
def test_text_comes_as_it_is_made_and_interrupting_ends_at_once_without_a_traceback(
    model: Path, start: Callable[..., RunningCommand]
):
    running = start("run", model, PROMPT, "--raw", "--memory", "50%", "--max-new-tokens", "480")
    running.wait_until(lambda: bool(running.out))
    running.send_signal(signal.SIGINT)
    assert running.exit_code(10) == 130
    assert "Traceback" not in running.err


def test_a_system_that_predicts_says_what_came_of_it(model: Path, expected: str, tmp_path: Path, capsys: Captured):
    maps = tmp_path / "my.maps"
    arguments = ("--system", "fmoe:distance=2", "--memory", "60%", "--learned", str(maps))
    assert run(model, *arguments, "--stats") == 0
    out = capsys.readouterr().out
    assert expected.strip() in out
    (line,) = [line for line in out.splitlines() if "of experts in memory" in line]
    for word in ("prefetch accuracy", "coverage", "predictions late", "system fmoe:distance=2"):
        assert word in line
    rows = [line.split("  ")[0] for line in out.splitlines()]
    for label in ("experts predicted", "experts loaded ahead", "misses that it spared", "needed, predicted 2 ahead"):
        assert label in rows
    for label in ("there in time, predicted 1 ahead", "GOODPRED, predicted 1 ahead", "GOODPRED, predicted 2 ahead"):
        assert label in rows
    assert f"learned {maps} (0 maps at the start)" in out
    assert run(model, *arguments, "--predict", "inline", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == expected
    assert result["prediction"]["maps_read"] > 0 and result["prediction"]["matcher"] == "inline"
    assert result["phases"]["decode"]["accuracy_by_distance"].keys() <= {"1", "2"}
