"""A manifest survives its own round trip and nothing else does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from expertly.core.errors import StoreError
from expertly.store.manifest import FileEntry, Manifest, Rounding
from tests.store.builders import PLAN

FULL = replace(
    PLAN,
    files={"config.json": FileEntry(3, (1 << 64) - 1)},
    rounding=Rounding("int4"),
    dense_formats={"a.q_proj": "q8_0"},
)


@pytest.mark.parametrize("manifest", [FULL, PLAN])
def test_round_trip(tmp_path: Path, manifest: Manifest) -> None:
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]  # no temporary file is left


def of_layer(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw["layers"][1].update({name: value})


BAD: list[tuple[dict[str, Any] | Callable[[dict[str, Any]], Any], str]] = [
    *(({"format_version": value}, "format_version=.*: must be 5") for value in (4, None, "5", True)),
    ({"format_version": 3, "codec": "planes"}, "format_version=3: must be 5"),  # whose experts were compressed
    *(({name: None}, f"{name}=None: ") for name in asdict(FULL) if name != "rounding"),
    *(({"dtype": value}, "dtype=") for value in ("NaN", "int8", ["bfloat16"], "BF16")),
    *(({"sites": value}, "sites") for value in ([], ["a"], [1, 2])),
    *(({"layers": value}, "layers") for value in ([], [{}, {}], [1, 2], {})),
    *(({"files": {"x": value}}, r"files\.x") for value in (1, {"nbytes": -1, "checksum": 0}, {"nbytes": 1.5}, {})),
    *(({"files": {name: asdict(FileEntry(1, 1))}}, "files.*same folder") for name in ("../x", "/x", "a/b", "..", "")),
    ({"identity": 3}, "identity=3: must be a valid string"),
    ({"dense_formats": {"a": "zip"}}, "dense_formats='zip': accepted: mxfp4"),
    (lambda raw: raw["rounding"].update(to=float("nan")), r"rounding\.to=nan: must be a valid string"),
    (lambda raw: raw.pop("sites"), "sites: "),
    (of_layer("num_experts", 0), r"layers\[1\].*num_experts=0"),
    (of_layer("top_k", 99), r"layers\[1\].*top_k=99"),
    (of_layer("hidden_size", 1.5), r"layers\[1\]\.hidden_size=1.5: must be a valid integer"),
    (of_layer("hidden_size", 1 << 60), r"layers\[1\].*hidden_size=1152921504606846976: must be from 1 to"),
    (of_layer("itemsize", 4), r"layers\[1\]\.itemsize=4: must be 2, the size of bfloat16"),
    (of_layer("unknown", 1), r"layers\[1\]\.unknown=1"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_bad_field_is_named(
    tmp_path: Path, change: dict[str, Any] | Callable[[dict[str, Any]], Any], message: str
) -> None:
    raw = json.loads(json.dumps(asdict(FULL)))
    raw.update(change) if isinstance(change, dict) else change(raw)
    (tmp_path / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(
        StoreError, match=rf"manifest\.json: {message}.*; remove the store and pack again with `expertly pack`"
    ):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_garbage_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"manifest\.json: (not JSON|.*must be an object|is no text in UTF-8)"):
        Manifest.read(tmp_path)
