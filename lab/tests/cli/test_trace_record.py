"""`expertly lab trace record` from prompts in a file to a trace, on a tiny random model."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from expertly.cli.main import main
from expertly_lab.recording import Recording
from expertly_lab.trace.reader import Trace
from tests.cli.asking import Captured
from tests.families import make_checkpoint, make_tokenizer, reference_generate

PROMPTS = ("Once upon a time", "def main():", "2 + 2 = ")
CATEGORIES = ("story", None, "math")
NUM_NEW = 8


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", *zip(PROMPTS, CATEGORIES, strict=True))


def write_prompts(path: Path, *prompts: tuple[str, str | None]) -> Path:
    lines = [
        json.dumps({"prompt": text} | ({} if category is None else {"category": category}))
        for text, category in prompts
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def record(model: Path, prompts: Path, out: Path, *arguments: str) -> int:
    settings = ("--max-new-tokens", str(NUM_NEW), "--memory", "50%", *arguments)
    return main(["lab", "trace", "record", str(model), "--prompts", str(prompts), "--out", str(out), *settings])


def tokens_of(text: str) -> list[int]:
    ids: list[int] = make_tokenizer()(text)["input_ids"]
    return ids


def test_chats_are_recorded_by_the_models_template(model: Path, tmp_path: Path, capsys: Captured):
    """A plain prompt is a user's message; with --raw it is the text that it is, and a chat is refused."""
    chatty = make_checkpoint("qwen3_moe", tmp_path / "chatty", seed=31, tokenizer=True)
    template = "{% for one in messages %}[{{ one.role }}] {{ one.content }} {% endfor %}[assistant]"
    (chatty / "chat_template.jinja").write_text(template)
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + '\n{"prompt": "Hello"}\n')
    assert record(chatty, tmp_path / "chats.jsonl", tmp_path / "trace") == 0
    trace = Trace.open(tmp_path / "trace")
    for request, text in zip(
        trace.requests, ("[system] Be brief. [user] Hello [assistant]", "[user] Hello [assistant]"), strict=True
    ):
        rows = trace.rows("token", request.first_row, request.first_row + request.num_prompt_tokens)
        assert rows.tolist() == tokens_of(text)
    capsys.readouterr()
    assert record(chatty, tmp_path / "chats.jsonl", tmp_path / "raw", "--raw") == 2
    assert "line 1: holds messages, with --raw" in capsys.readouterr().err
    assert record(model, tmp_path / "chats.jsonl", tmp_path / "none") == 2
    assert "the model has no chat template" in capsys.readouterr().err


def test_a_trace_of_the_tokens_that_the_unmodified_model_makes(
    model: Path, prompts: Path, tmp_path: Path, capsys: Captured
):
    out = tmp_path / "made" / "trace"
    assert record(model, prompts, out) == 0
    line = capsys.readouterr().out
    trace = Trace.open(out)
    assert trace.is_complete
    for request, text, category in zip(trace.requests, PROMPTS, CATEGORIES, strict=True):
        ids = tokens_of(text)
        expected = reference_generate(model, [ids], NUM_NEW)[0]
        assert (request.prompt, request.category, request.num_prompt_tokens) == (text, category, len(ids))
        rows = trace.rows("token", request.first_row, request.first_row + request.num_rows)
        assert rows.tolist() == ids + expected[:-1], "the last token is never fed"
        assert request.has_own_iterations
    num_rows = sum(len(tokens_of(text)) + NUM_NEW - 1 for text in PROMPTS)
    assert (trace.num_rows, trace.num_iterations) == (num_rows, 3 * NUM_NEW)
    assert not trace.has("probs")
    assert trace.manifest.model == str(model)
    for word in ("3 requests", f"{3 * NUM_NEW} iterations", f"{num_rows} rows", "KiB", "TPOT", str(out)):
        assert word in line
    assert line.count("\n") == 1


def rows_of(out: Path) -> list[list[int]]:
    """The tokens of each request, but for the last ones."""
    trace = Trace.open(out)
    return [
        trace.rows("token", request.first_row, request.first_row + request.num_rows).tolist()
        for request in trace.requests
    ]


def test_a_temperature_draws_by_the_seed(model: Path, prompts: Path, tmp_path: Path):
    """The same seed draws the same tokens, another one others; none is drawn without a temperature."""
    hot = ("--temperature", "2.5")
    runs = {
        "greedy": (),
        "zero": ("--temperature", "0", "--seed", "5"),
        "first": (*hot, "--seed", "5"),
        "again": (*hot, "--seed", "5", "--memory", "30%"),
        "seed 0": hot,
    }
    for name, arguments in runs.items():
        assert record(model, prompts, tmp_path / name, *arguments) == 0
    rows = {name: rows_of(tmp_path / name) for name in runs}
    expected = [tokens_of(text) for text in PROMPTS]
    for name, result in rows.items():
        assert [row[: len(ids)] for row, ids in zip(result, expected, strict=True)] == expected, name
    assert rows["greedy"] == rows["zero"]
    assert rows["first"] == rows["again"]
    assert len({json.dumps(rows[name]) for name in ("greedy", "first", "seed 0")}) == 3


def test_json_full_and_a_share_of_the_prompts(model: Path, prompts: Path, tmp_path: Path, capsys: Captured):
    out = tmp_path / "trace"
    assert record(model, prompts, out, "--full", "--requests", "2", "--json", "--system", "lfu:segments=4") == 0
    result = json.loads(capsys.readouterr().out)
    trace = Trace.open(out)
    assert {"probs", "lookahead", "router_inputs", "embedding"} <= trace.manifest.fields.keys()
    assert (result["requests"], result["skipped"], result["new_tokens"]) == (2, 0, 2 * NUM_NEW)
    assert (result["rows"], result["iterations"]) == (trace.num_rows, trace.num_iterations)
    assert (result["system"], result["segments"], result["absent"]) == ("lfu:segments=4", 4, {})
    assert result["bytes"] == sum(path.stat().st_size for path in out.iterdir())
    assert result["tpot_s"] > 0


def test_a_prompt_that_is_too_long_is_skipped_and_named(model: Path, tmp_path: Path, capsys: Captured):
    """The model has 512 positions: 513 tokens are too many, 512 leave room for one new token, 510 for three."""
    texts = ["x" * 513, "y" * 512, "short", "z" * 510]
    prompts = write_prompts(tmp_path / "p.jsonl", *[(text, None) for text in texts])
    assert record(model, prompts, tmp_path / "trace", "--json") == 0
    out, err = capsys.readouterr()
    assert "skipped: the prompt in line 1 has 513 tokens; the model takes at most 512" in err
    result = json.loads(out)
    assert (result["requests"], result["skipped"]) == (3, 1)
    assert result["new_tokens"] == 1 + NUM_NEW + 3
    trace = Trace.open(tmp_path / "trace")
    assert [request.prompt for request in trace.requests] == texts[1:]
    assert [request.num_rows for request in trace.requests] == [512, 5 + NUM_NEW - 1, 512]
    only = write_prompts(tmp_path / "only.jsonl", (texts[0], None))
    assert record(model, only, tmp_path / "none") == 2
    assert "none of the 1 can be given to this model" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_recording_that_is_interrupted_keeps_what_is_complete(
    model: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
):
    """In the third pass of the third request."""
    text, out, passes = "Once upon a time", tmp_path / "trace", []
    prompts = write_prompts(tmp_path / "p.jsonl", *[(text, "story")] * 10)
    end_iteration = Recording.end_iteration

    def interrupting(self: Recording, ok: bool) -> None:
        end_iteration(self, ok)
        passes.append(ok)
        if len(passes) == 2 * NUM_NEW + 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Recording, "end_iteration", interrupting)
    assert record(model, prompts, out) == 130
    printed, said = capsys.readouterr()
    assert printed == "" and f"{out}: kept what was recorded, 2 of 10 requests and " in said
    assert said.endswith("expertly: interrupted\n") and "Traceback" not in said
    trace = Trace.open(out)
    ids = tokens_of(text)
    expected = reference_generate(model, [ids], NUM_NEW)[0]
    assert not trace.is_complete and len(trace.requests) == 3
    for request in trace.requests[:2]:
        rows = trace.rows("token", request.first_row, request.first_row + request.num_rows)
        assert rows.tolist() == ids + expected[:-1]
    assert trace.num_iterations >= 2 * NUM_NEW + 3
