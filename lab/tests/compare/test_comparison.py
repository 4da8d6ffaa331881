"""What a comparison writes into, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertly.core.errors import ConfigError, ExpertlyError
from expertly_lab.compare.comparison import prepare
from tests.hostile.test_links import linked, make_precious, seen


def test_an_earlier_comparison_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    precious = make_precious(tmp_path / "precious")
    out = tmp_path / "out"
    prepare(out, "compare")
    (out / "trace").mkdir()
    (out / "trace" / "rows-00000.safetensors").touch()
    (out / "trace" / "thesis.txt").write_text("mine")
    prepare(out, "compare")
    assert [path.name for path in (out / "trace").iterdir()] == ["thesis.txt"]
    linked(out / "report.html", precious / "thesis.txt")
    before = seen(tmp_path)
    with pytest.raises(ExpertlyError, match="a link is in the way"):
        prepare(out, "compare", force=True)
    assert seen(tmp_path) == before
    with pytest.raises(ConfigError, match="no earlier comparison"):
        prepare(precious, "compare", force=True)
