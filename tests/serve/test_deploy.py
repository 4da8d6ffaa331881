"""The files in deploy/ say what the command and the application accept."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from expertly.model.packing import pack_cached
from expertly.store.cache import remove_entry
from tests.command_lines import parse
from tests.weights import put_beside

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def words_of_container() -> list[str]:
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8").replace("\\\n", "")
    found = dict(re.findall(r"^(ENTRYPOINT|CMD) (\[.*\])$", text, re.MULTILINE))
    return [*json.loads(found["ENTRYPOINT"]), *json.loads(found["CMD"])]


def words_of_unit() -> list[str]:
    text = (DEPLOY / "expertly.service").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    (example,) = re.findall(r"e\.g\. EXPERTLY_ARGS=(.*)$", text, re.MULTILINE)
    return shlex.split(line.replace("$EXPERTLY_ARGS", example))


def test_the_command_takes_what_is_given_to_it() -> None:
    for program, *arguments in (words_of_container(), words_of_unit()):
        assert program == "/opt/expertly/bin/expertly"
        assert parse(arguments)["api_key_file"], "others can reach it"
    text = (DEPLOY / "expertly.service").read_text(encoding="utf-8")
    (patience,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(patience) > parse(words_of_unit()[1:])["drain_seconds"], "systemd waits longer than the server drains"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
@pytest.mark.parametrize(("name", "program"), [("expertly.service", "expertly"), ("ray-node.service", "ray")])
def test_systemd_understands_the_unit(name: str, program: str, tmp_path: Path) -> None:
    """With a program that is there in place of the one that is not."""
    unit = tmp_path / name
    text = (DEPLOY / name).read_text(encoding="utf-8")
    unit.write_text(text.replace(f"/opt/expertly/bin/{program}", "/bin/true"), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if name in line]
    assert said == [] and done.returncode == 0, done.stderr


def test_what_the_container_copies_is_there() -> None:
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    named = [name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for name in line.split()]
    assert named and all((DEPLOY.parent / name).exists() for name in named)


def test_the_old_versions_folder_is_as_it_was_whatever_the_new_one_does(tmp_path: Path) -> None:
    """As documented: the cache folder is copied with hard links, then used, packed again, learned into."""
    old, new = tmp_path / "0.1", tmp_path / "0.2"
    put_beside(pack_cached(None, "bfloat16", old).folder, 16)
    subprocess.run(["cp", "-al", str(old), str(new)], check=True)
    before = {path: path.read_bytes() for path in sorted(old.rglob("*")) if path.is_file()}
    copied = pack_cached(None, "bfloat16", new)
    assert copied.folder.parent.parent == new
    put_beside(copied.folder, 8)
    remove_entry(copied.folder.name, new)
    pack_cached(None, "bfloat16", new)
    assert {path: path.read_bytes() for path in sorted(old.rglob("*")) if path.is_file()} == before
