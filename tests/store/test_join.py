"""Byte planes become the same weights with the compiled join and without it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from expertly.store import frames
from expertly.store import join as module
from expertly.store.join import VERSION, compiled_join
from tests.store.planes import DTYPES, KINDS, LAYER, encoded, weights
from tests.store.test_frames import decode

SOURCE = Path(module.__file__).with_name("join.c")

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")


def compile_into(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "join.c").write_text(text)
    command = ["gcc", "-O3", "-std=gnu11", "-shared", "-fPIC", "-o", folder / "_join.so", folder / "join.c"]
    subprocess.run(command, check=True)
    return folder


@needs_compiler
@pytest.mark.parametrize("num_planes", [2, 4])
@pytest.mark.parametrize("count", [0, 1, 7, 64, 4099])
def test_the_highest_plane_comes_first(num_planes: int, count: int, tmp_path: Path) -> None:
    join = compiled_join(compile_into(tmp_path / "library", SOURCE.read_text()))
    assert join is not None
    words = np.random.default_rng(count).integers(0, 256, (count, num_planes), np.uint8)
    out = bytearray(b"\xaa" * (count * num_planes + 8))
    planes = [np.ascontiguousarray(words[:, byte]) for byte in reversed(range(num_planes))]
    join(planes, memoryview(out)[: count * num_planes])
    assert bytes(out) == words.tobytes() + b"\xaa" * 8


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_decoders_make_the_same_bits_either_way(
    kind: str, dtype: str, is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = replace(LAYER, itemsize=DTYPES[dtype])
    raw = weights(kind, dtype, layer.nbytes // layer.itemsize)
    index, stored = encoded(layer, raw, tmp_path)
    joined = []

    def join(planes: Sequence[NDArray[np.uint8]], out: memoryview) -> None:
        compiled = compiled_join()
        assert compiled is not None
        joined.append(len(planes))
        compiled(planes, out)

    if is_compiled and compiled_join() is None:
        pytest.skip("not compiled here")
    monkeypatch.setattr(frames, "compiled_join", lambda: join if is_compiled else None)
    assert decode(index, stored) == raw.tobytes()
    assert joined == [layer.itemsize] * (len(stored) if is_compiled else 0)


@needs_compiler
def test_a_library_of_another_version_or_none_at_all_is_left_alone(tmp_path: Path) -> None:
    text = SOURCE.read_text()
    assert f"return {VERSION};" in text
    newer = text.replace(f"return {VERSION};", f"return {VERSION + 1};")
    assert compiled_join(compile_into(tmp_path / "newer", newer)) is None
    assert compiled_join(compile_into(tmp_path / "lacks", text.replace("join_four", "join_five"))) is None
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "_join.so").write_bytes(b"no library")
    assert compiled_join(tmp_path / "damaged") is None
    assert compiled_join(tmp_path / "nowhere") is None
