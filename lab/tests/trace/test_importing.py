"""Published routing becomes a trace of the same numbers, or is refused by file and array."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertly.core.errors import TraceError
from expertly.core.geometry import DenseShape
from expertly_lab.trace.importing import import_npz
from expertly_lab.trace.reader import Trace
from expertly_lab.trace.schema import TraceLayer
from lab.tests.trace.builders import Rows

LENGTHS = [3, 0, 5]
ROOT = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get("EXPERTLY_TEST_DATA", ROOT.parent / "shared" / "data")) / "routing"


def arrays(num_tokens: int = 8, num_layers: int = 3, top_k: int = 2, num_experts: int = 11) -> Rows:
    rng = np.random.default_rng(0)
    order = np.argsort(rng.random((num_tokens, num_layers, num_experts)), axis=-1)
    experts = order[..., :top_k].astype(np.uint8)
    experts[0, 0, 0], experts[0, 0, 1] = num_experts - 1, 0
    return {
        "experts": experts,
        "weights": rng.random(experts.shape).astype(np.float16),
        "seq_len": np.array(LENGTHS, np.int32),
        "token_index": rng.integers(0, 1000, num_tokens).astype(np.int32),
    }


def save(folder: Path, change: dict[str, Any] | None = None, name: str = "a.npz") -> Path:
    kept = {key: value for key, value in (arrays() | (change or {})).items() if value is not None}
    np.savez_compressed(folder / name, **kept)
    return folder / name


def run_import(source: Path, **options: Any) -> Trace:
    folder = source.parent / "trace"
    import_npz(source, folder, model="m", **options)
    return Trace.open(folder)


def test_rows_are_the_sources_and_what_was_made_up_is_said(tmp_path: Path) -> None:
    trace = run_import(save(tmp_path), created="now", command="c")
    expected = arrays()
    for field, name in (("experts", "experts"), ("weights", "weights"), ("token", "token_index")):
        np.testing.assert_array_equal(trace.rows(field, 0, 8), expected[name])
    assert trace.rows("request", 0, 8).tolist() == [0, 0, 0, 2, 2, 2, 2, 2]
    assert trace.num_iterations == 8 and not trace.rows("is_prefill", 0, 8).any()
    assert [request.num_rows for request in trace.requests] == LENGTHS
    assert (trace.manifest.created, trace.manifest.command, trace.is_complete) == ("now", "c", True)
    fields = trace.manifest.fields
    assert {name for name, field in fields.items() if not field.is_real} == {"embedding", "is_prefill"}
    assert "16" not in fields["experts"].note and "rounded up to a power of two" in fields["experts"].note


def test_a_source_without_tokens_and_weights(tmp_path: Path) -> None:
    trace = run_import(save(tmp_path, {"token_index": None, "weights": None}))
    assert not trace.has("embedding") and not trace.is_real("token") and not trace.is_real("weights")
    assert set(trace.rows("token", 0, 8).tolist()) == {-1}
    assert set(trace.rows("weights", 0, 8).reshape(-1).tolist()) == {0.5}


def test_files_beside_the_source_are_used(tmp_path: Path) -> None:
    probs = np.random.default_rng(1).integers(0, 256, (8, 3, 2), np.uint8)
    np.savez_compressed(tmp_path / "probs_u8.npz", probs_x255=probs)
    entries = [{"category": "code", "prompt": "a", "x": 1}, {"prompt": None}, {"category": "math"}]
    (tmp_path / "sequences.json").write_text(json.dumps(entries))
    trace = run_import(save(tmp_path, {"weights": None}))
    np.testing.assert_allclose(trace.rows("weights", 0, 8), probs / 255, rtol=1e-3)
    assert trace.is_real("weights")
    assert [(request.category, request.prompt) for request in trace.requests] == [
        ("code", "a"),
        (None, None),
        ("math", None),
    ]


def test_the_number_of_experts(tmp_path: Path) -> None:
    def imported(name: str, **options: Any) -> int:
        (tmp_path / name).mkdir()
        return run_import(save(tmp_path / name), **options).manifest.layers[0].num_experts

    layers = (TraceLayer(12, 2, 8, 8, 3, 2),) * 3
    assert imported("guessed") == 16
    assert imported("of the geometry", layers=layers) == 12
    (tmp_path / "all").mkdir()
    trace = run_import(save(tmp_path / "all"), layers=layers, dense=DenseShape(5, 6))
    assert trace.manifest.layers == layers and trace.manifest.dense == DenseShape(5, 6)
    assert trace.manifest.fields["experts"].note == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": (TraceLayer(12, 2),) * 4}, "array 'experts': 3 layers, but the geometry has 4"),
        ({"layers": (TraceLayer(12, 3),) * 3}, "array 'experts': top-2 routing, but the geometry chooses 3"),
        ({"layers": (TraceLayer(8, 2),) * 3}, "expert 10 of layer 0: must be below the 8"),
    ],
)
def test_a_geometry_that_does_not_fit_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        run_import(save(tmp_path), **options)
    assert not (tmp_path / "trace").exists()


def bad_weights() -> np.ndarray:
    weights = arrays()["weights"].copy()
    weights[5, 1, 0] = np.nan
    return weights


def twice() -> np.ndarray:
    experts = arrays()["experts"].copy()
    experts[4, 2] = 7
    return experts


BAD_ARRAYS = {
    "no experts": ({"experts": None}, "array 'experts': missing; the file has 'weights', 'seq_len', 'token_index'"),
    "no lengths": ({"seq_len": None}, "array 'seq_len': missing"),
    "two dimensions": ({"experts": np.zeros((8, 3), np.uint8)}, r"'experts': shape \[8, 3\]; must have 3 dimensions"),
    "no layers": ({"experts": np.zeros((8, 0, 2), np.uint8)}, r"'experts': shape \[8, 0, 2\]; must be \[tokens, "),
    "floats": ({"experts": np.zeros((8, 3, 2))}, "'experts': dtype float64; must be unsigned or whole numbers"),
    "negative": ({"experts": np.full((8, 3, 2), -1)}, "'experts': ids from -1 to -1; must be from 0"),
    "huge": ({"experts": np.full((8, 3, 2), 1 << 40)}, "'experts': ids from .* must be from 0 to 65534"),
    "twice": ({"experts": twice()}, "'experts': row 4: expert 7 of layer 2 is chosen twice"),
    "weights' shape": ({"weights": np.zeros((8, 3, 3))}, r"'weights': shape \[8, 3, 3\]; must be \[8, 3, 2\]"),
    "weights' dtype": ({"weights": np.zeros((8, 3, 2), int)}, "'weights': dtype int64; must be floating-point"),
    "NaN": ({"weights": bad_weights()}, "'weights': row 5: must be finite"),
    "lengths": ({"seq_len": np.array([3, 4])}, "'seq_len': the lengths add up to 7, but there are 8 tokens"),
    "negative length": ({"seq_len": np.array([9, -1])}, "'seq_len': -1: must be from 0"),
    "overflow": ({"seq_len": np.array([1 << 63, 1 << 63, 8], np.uint64)}, "'seq_len': the lengths add up to 18446744"),
    "tokens": ({"token_index": np.zeros(7, int)}, r"'token_index': shape \[7\]; must be \[8\], one a token"),
    "token ids": ({"token_index": np.full(8, 1 << 40)}, "'token_index': must be token ids, from 0"),
    "objects": ({"seq_len": np.array([3, None], object)}, "'seq_len': damaged, or pickled objects"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_a_bad_array_is_named(tmp_path: Path, case: str) -> None:
    change, message = BAD_ARRAYS[case]
    source = save(tmp_path, change)
    with pytest.raises(TraceError, match=message) as error:
        run_import(source)
    assert str(error.value).startswith(f"{source}: array ")
    assert not (tmp_path / "trace").exists()


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    source = tmp_path / "a.npz"
    good = save(tmp_path).read_bytes()
    for content in (b"", b"nonsense", good[: len(good) // 2]):
        source.write_bytes(content)
        with pytest.raises(TraceError, match=f"{source}: must be an npz file"):
            run_import(source)
    with pytest.raises(TraceError, match=r"absent.npz: must be an npz file \(No such file or directory\)"):
        run_import(tmp_path / "absent.npz")


def test_headers_that_lie_are_refused(tmp_path: Path) -> None:
    header = io.BytesIO()
    fields = {"descr": "|u1", "fortran_order": False, "shape": (1 << 50, 24, 4)}
    np.lib.format.write_array_header_1_0(header, fields)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("experts.npy", header.getvalue() + b"x" * 96)
    with pytest.raises(TraceError, match=r"array 'experts': damaged"):
        run_import(tmp_path / "a.npz")


def test_flipped_bytes_raise_nothing_but_trace_errors(tmp_path: Path) -> None:
    good = save(tmp_path).read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for number in range(40):
        raw = bytearray(good)
        raw[int(rng.integers(len(raw)))] ^= 1 << int(rng.integers(8))
        source = tmp_path / str(number) / "a.npz"
        source.parent.mkdir()
        source.write_bytes(bytes(raw))
        try:
            run_import(source)
        except TraceError as error:
            assert str(source) in str(error)
            refused += 1
    assert refused > 12


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[{}, {}]", "2; must be a list of 3 objects"),
        (b"{}", r"\{\}: must be a valid array"),
        (b"nonsense", "not JSON"),
        (b"[{}, 1, {}]", r"\[1\]=1: must be an object"),
        (b'[{}, {}, {"category": 5}]', r"\[2\].category=5: must be a valid string"),
    ],
)
def test_bad_sequences_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "sequences.json").write_bytes(content)
    with pytest.raises(TraceError, match=rf"sequences.json: {message}"):
        run_import(save(tmp_path))


@pytest.mark.skipif(not DATA.is_dir(), reason="EXPERTLY_TEST_DATA does not lead to the published routing")
def test_published_routing(tmp_path: Path) -> None:
    source = DATA / "gpt_oss_20b" / "experts.npz"
    import_npz(source, tmp_path / "gpt", model="gpt-oss-20b")
    trace = Trace.open(tmp_path / "gpt")
    assert (trace.num_rows, len(trace.requests), trace.manifest.layers) == (155_103, 532, (TraceLayer(32, 4),) * 24)
    with np.load(source) as arrays_of:
        np.testing.assert_array_equal(trace.rows("experts", 70_000, 90_000), arrays_of["experts"][70_000:90_000])
        assert [request.num_rows for request in trace.requests] == arrays_of["seq_len"].tolist()
    assert trace.requests[0].category == "fact_checking"
    import_npz(DATA / "deepseek_v2_lite_esft" / "law.npz", tmp_path / "law", model="law")
    trace = Trace.open(tmp_path / "law")
    assert (trace.num_rows, len(trace.requests), trace.manifest.layers) == (8_327, 33, (TraceLayer(64, 6),) * 26)
    assert not trace.has("embedding") and trace.is_real("weights")
