"""What `expertly` learned, from the command line: kept between two runs, told, and looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertly.cli.main import main
from tests.policies.learned_builders import IDENTITY, make_store, taught

PROMPT = "Once upon a time"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    from expertly.policies.learned import save_learned

    path = tmp_path / "a.reuse"
    about = {"model": "\x1b[2J", "source": "a test", "created": "2026-01-02T03:04:05+00:00"}
    save_learned(path, taught(70), IDENTITY, about)
    return path


def run(model: Path, *arguments: str) -> int:
    return main(["generate", str(model), "--prompt", PROMPT, "--memory", "50%", "--max-new-tokens", "20", *arguments])


def test_the_second_run_begins_with_what_the_first_learned(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "my.reuse")
    arguments = ("--system", "expertly", "--learned", path)
    assert run(model, *arguments, "--stats") == 0
    out = capsys.readouterr().out
    assert f"[reuse: began with nothing learned: there was no {path} | " in out
    text = out[: out.index("\n[")]
    assert run(model, *arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["reuse"]["history"] == "warm" and result["text"].rstrip("\n") == text.rstrip("\n")
    num_read, num = result["reuse"]["tokens_read"], result["reuse"]["tokens"]
    assert num == 2 * num_read > 0
    assert run(model, *arguments, "--stats") == 0
    line = f"[reuse: began with what {num} tokens had taught: {path} | {3 * num_read} tokens by now]"
    assert line in capsys.readouterr().out
    assert run(model, "--system", "expertly", "--learned", "off", "--stats") == 0
    assert f"[reuse: began with nothing learned: learned=off | {num_read} tokens by now]" in capsys.readouterr().out
    assert run(model, "--learned", "off", "--json") == 0
    assert json.loads(capsys.readouterr().out)["reuse"] is None, "lru learns nothing"


def test_a_file_that_cannot_be_read_is_an_error_where_it_was_named(
    model: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, "--system", "expertly", "--learned", str(file)) == 2
    err = capsys.readouterr().err
    assert f"{file}: identity='4444" in err and "Traceback" not in err
    assert run(model, "--system", "expertly", "--learned", str(file), "--devices", "cpu:0,cpu:1") == 2
    assert "2 devices learn apart; accepted: auto, off" in capsys.readouterr().err


def test_info_says_what_there_is(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "learned", "info", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["tokens"], facts["weights"], facts["experts"]) == (70, 22 * 22, 22)
    assert (facts["num_layers"], facts["num_experts"], facts["top_k"]) == (3, [8, 6, 8], [2, 3, 3])
    assert (facts["identity"], facts["about"]["created"]) == (IDENTITY, "2026-01-02T03:04:05+00:00")
    assert facts["file_bytes"] == file.stat().st_size
    assert main(["lab", "learned", "info", str(file)]) == 0
    out = capsys.readouterr().out
    first, *lines = out.splitlines()
    assert "3 layers of 6 to 8 experts, top-2 to 3 | learned of reuse from 70 tokens | " in first
    assert any(line.startswith("created") and line.endswith("2026-01-02T03:04:05+00:00") for line in lines)
    assert any("484 of 22 experts: discount 0.9, horizon 8" in line for line in lines)
    assert "\x1b" not in out, "a terminal does not obey a file"
    file.write_bytes(file.read_bytes()[:-4])
    assert main(["lab", "learned", "info", str(file)]) == 2
    assert "reach beyond" in capsys.readouterr().err


def test_other_commands_say_what_they_take(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from expertly.policies.learned import save_learned

    maps, out, before = tmp_path / "a.maps", str(tmp_path / "out.npz"), file.read_bytes()
    save_learned(maps, make_store(), IDENTITY)
    accepted = "format='expertly-reuse': not a file of that kind; accepted: 'expertly-maps'"
    for arguments in (("export", str(file), out), ("merge", out, str(file))):
        assert main(["lab", "learned", *arguments]) == 2
        assert accepted in capsys.readouterr().err
    assert main(["lab", "learned", "merge", out, str(maps), str(file)]) == 2
    assert accepted in capsys.readouterr().err
    assert file.read_bytes() == before and not Path(out).exists()
