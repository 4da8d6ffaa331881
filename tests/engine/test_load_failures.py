"""A model that cannot be loaded leaves nothing behind: no open file, no thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly import api
from expertly.core.errors import ConfigError
from expertly.engine import cpu
from expertly.engine import group as groups
from tests.engine.conftest import Cases
from tests.engine.observe import open_files, reader_threads


def raising(*_: Any, **__: Any) -> None:
    raise ConfigError("no such luck")


@pytest.mark.parametrize(
    ("where", "name"),
    [(api, "record"), (cpu.KIND, "make"), (groups, "Shard"), (api, "Engine")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_was_opened_is_closed_again(
    where: Any, name: str, cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the error is there, too, which holds on to all that was known where it was raised."""
    monkeypatch.setattr(where, name, raising)
    with pytest.raises(ConfigError, match="no such luck") as raised:
        expertly.load(
            str(cases["mixtral"].store), memory="50%", system="lru", decisions=tmp_path / "made", device="cpu"
        )
    assert raised.tb is not None and (tmp_path / "made").exists()
    assert open_files(tmp_path) == [] and reader_threads() == []


def test_memory_that_a_processor_does_not_have(cases: Cases, tmp_path: Path) -> None:
    """Found out when the file of decisions has been opened."""
    arguments: dict[str, Any] = {"memory": "50%", "system": "lru", "device": "cpu", "host_memory": "1GiB"}
    with pytest.raises(ConfigError, match="host_memory='1GiB'") as raised:
        expertly.load(str(cases["mixtral"].store), decisions=tmp_path / "made", **arguments)
    assert raised.tb is not None and open_files(tmp_path) == []
