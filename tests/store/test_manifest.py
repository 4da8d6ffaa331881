"""A manifest survives its own round trip and nothing else does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertly.core.errors import StoreError
from expertly.store.manifest import FileEntry, Manifest
from tests.store.builders import PLAN

FULL = Manifest(
    PLAN.identity, PLAN.source, PLAN.model_type, PLAN.dtype, PLAN.layers, PLAN.sites, {"config.json": FileEntry(3, 7)}
)


@pytest.mark.parametrize("codec", ["none", "planes"])
def test_round_trip(tmp_path: Path, codec: str) -> None:
    full = replace(FULL, codec=codec)
    full.write(tmp_path)
    assert Manifest.read(tmp_path) == full
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]  # no temporary file is left


BAD = {
    "format_version": [1, None, "1", True, 1.0],
    "identity": [None, 3],
    "source": [None],
    "model_type": [None, []],
    "dtype": ["NaN", None, "int8", ["bfloat16"], "BF16"],
    "codec": ["zstd", None, 1, "auto", ["planes"], ""],
    "layers": [None, [], [{}, {}], [1, 2], {}],
    "sites": [None, [], ["a"], [1, 2]],
    "files": [None, [], {"x": 1}, {"x": {"nbytes": -1, "checksum": 0}}, {"x": {"nbytes": 1.5, "checksum": 0}}],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_a_bad_field_is_named(tmp_path: Path, field: str, value: Any) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(FULL.as_dict() | {field: value}))
    with pytest.raises(StoreError, match=rf"manifest\.json: {field}"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "..", ""])
def test_a_file_outside_the_store_is_refused(tmp_path: Path, name: str) -> None:
    files = {name: {"nbytes": 1, "checksum": 1}}
    (tmp_path / "manifest.json").write_text(json.dumps(FULL.as_dict() | {"files": files}))
    with pytest.raises(StoreError, match="same folder"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_experts", 0, "num_experts=0"),
        ("num_experts", -1, "num_experts=-1"),
        ("top_k", 99, "top_k=99"),
        ("num_matrices", 4, "num_matrices=4"),
        ("hidden_size", 1.5, "hidden_size=1.5: must be a whole number"),
        ("hidden_size", 1 << 60, "must be a whole number"),
        ("intermediate_size", "8", "must be a whole number"),
        ("itemsize", 4, "itemsize disagrees"),
        ("unknown", 1, "must be an object of"),
    ],
)
def test_a_bad_layer_is_named(tmp_path: Path, field: str, value: Any, message: str) -> None:
    raw = FULL.as_dict()
    raw["layers"][1][field] = value
    (tmp_path / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(StoreError, match=message) as error:
        Manifest.read(tmp_path)
    assert "layers[1]" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_garbage_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"manifest\.json"):
        Manifest.read(tmp_path)
