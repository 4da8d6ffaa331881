"""A bad trace is refused with the file and the field, whatever is wrong with it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertly.core.errors import TraceError
from expertly.core.headers import read_safetensors_header
from expertly_lab.trace.reader import Trace
from lab.tests.trace.builders import FULL, iterations, read_everything, write_trace

SHARD = "rows-00001.safetensors"  # the second


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of 8, 8 and 5 rows."""
    return write_trace(tmp_path / "trace", iterations([3, 1, 4, 8, 2, 1, 1, 1], FULL), 8, FULL)


def edit_manifest(folder: Path, change: Callable[[Any], Any]) -> None:
    path = folder / "manifest.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def poke(folder: Path, field: str, position: int, value: Any, dtype: Any) -> None:
    """Overwrite one number of a field of the second shard."""
    info = read_safetensors_header(folder / SHARD, TraceError)[field]
    with (folder / SHARD).open("r+b") as file:
        file.seek(info.begin + position * np.dtype(dtype).itemsize)
        file.write(np.array(value, dtype).tobytes())


BAD_MANIFESTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "format": (lambda m: m.update(format="x"), "format='x': must be 'expertly-trace'"),
    "version": (lambda m: m.update(version=2), "version=2: must be 1"),
    "complete": (lambda m: m.update(complete="yes"), "complete='yes': must be a valid boolean"),
    "model": (lambda m: m.pop("model"), "model: Field required"),
    "requests": (lambda m: m.update(requests="../x"), r"requests='../x': must be 'requests.jsonl'"),
    "no layers": (lambda m: m["geometry"].update(layers=[]), "0 layers; must be from 1"),
    "many layers": (lambda m: m["geometry"].update(layers=m["geometry"]["layers"] * 2000), "6000 layers"),
    "layer field": (lambda m: m["geometry"]["layers"][1].pop("top_k"), r"geometry.layers\[1\].top_k: Field required"),
    "no experts": (lambda m: m["geometry"]["layers"][1].update(num_experts=0), r"layers\[1\]=.*num_experts=0: must be"),
    "huge": (lambda m: m["geometry"]["layers"][1].update(num_experts=1 << 20), r"num_experts=1048576.*65535"),
    "top k": (lambda m: m["geometry"]["layers"][1].update(top_k=7), r"layers\[1\]=.*top_k=7: must be from 1 to 6"),
    "no geometry": (
        lambda m: m["geometry"]["layers"][0].update(
            hidden_size=4, intermediate_size=4, num_matrices=4, itemsize=2
        ),
        r"layers\[0\]=.* geometry field num_matrices=4",
    ),
    "dense": (lambda m: m.update(dense={"layer_nbytes": -1, "head_nbytes": 0}), "dense.layer_nbytes=-1: must be"),
    "unknown field": (lambda m: m["fields"].update(logits={}), "fields.logits.*must be 'request', "),
    "missing field": (lambda m: m["fields"].pop("weights"), "'weights' is missing"),
    "field dtype": (lambda m: m["fields"]["experts"].update(dtype="int8"), "experts.dtype='int8': must be uint16"),
    "field shape": (lambda m: m["fields"]["experts"].update(shape=[3, 2]), r"experts.shape=\(3, 2\): must be \(3, 3\)"),
    "real": (lambda m: m["fields"]["token"].update(real=1), "fields.token.real=1: must be a valid boolean"),
    "generator": (lambda m: m["fields"]["probs"].update(generator="x"), "fields.probs.generator='x'"),
    "shards": (lambda m: m.update(shards={}), r"shards=\{\}: must be a valid"),
    "shard file": (lambda m: m["shards"][0].update(file="../a"), r"shards\[0\].file='../a': must be a name in"),
    "shard rows": (lambda m: m["shards"][1].update(num_rows=-8), r"shards\[1\].num_rows=-8"),
    "shard order": (lambda m: m["shards"].reverse(), r"shards\[0\].first_row=16: must be 0"),
    "shard iterations": (lambda m: m["shards"][0].update(num_iterations=9), r"shards\[0\].num_iterations=9"),
    "fewer rows": (lambda m: m["shards"][2].update(num_rows=4), r"rows-00002.safetensors: field '.*manifest says"),
    "embedding of another width": (
        lambda m: m["fields"]["embedding"].update(shape=[6]),
        r"field 'embedding': F16 \[8, 5\], but the manifest says F16 \[8, 6\]",
    ),
    "a field that is in no shard": (lambda m: m["fields"].pop("probs"), "field 'probs' is not in the manifest"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_a_bad_manifest_is_named(folder: Path, case: str) -> None:
    change, message = BAD_MANIFESTS[case]
    edit_manifest(folder, change)
    with pytest.raises(TraceError, match=message) as error:
        Trace.open(folder)
    assert str(folder) in str(error.value)


def test_a_folder_that_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent: no such folder"):
        Trace.open(tmp_path / "absent")
    with pytest.raises(TraceError, match=r"manifest.json: no such file"):
        Trace.open(tmp_path)


def test_a_shard_that_is_truncated_longer_or_missing(folder: Path) -> None:
    path = folder / SHARD
    good = path.read_bytes()
    for kept in (0, 5, 4096, len(good) - 1):
        path.write_bytes(good[:kept])
        with pytest.raises(TraceError, match=f"{path}: truncated: {kept} bytes, the manifest says {len(good)}"):
            Trace.open(folder)
    path.write_bytes(good + b"x")
    with pytest.raises(TraceError, match=f"{path}: longer than it was"):
        Trace.open(folder)
    path.unlink()
    with pytest.raises(TraceError, match=f"{path}: missing shard: the manifest names it for 8 rows"):
        Trace.open(folder)


def test_a_shard_of_another_trace(folder: Path, tmp_path: Path) -> None:
    other = write_trace(tmp_path / "other", iterations([8, 8, 5]), 8)
    (folder / SHARD).write_bytes((other / SHARD).read_bytes())
    edit_manifest(folder, lambda m: m["shards"][1].update(nbytes=(folder / SHARD).stat().st_size))
    with pytest.raises(TraceError, match=f"{folder / SHARD}: field 'probs' is missing"):
        Trace.open(folder)


BAD_VALUES = [
    ("experts", 1, 8, "uint16", r"row 0 of the file, 8 of the trace: expert 8 of layer 0: must be below the 8"),
    ("experts", 9 + 3, 6, "uint16", r"row 1 .* expert 6 of layer 1: must be below the 6 of layer 1"),
    ("experts", 2, 5, "uint16", r"row 0 .* (layer 0 chooses more than its 2|expert 5 of layer 0 is chosen twice)"),
    ("weights", 9 * 3 + 4, float("nan"), "float16", r"row 3 .* nan: must be finite"),
    ("probs", 3, float("inf"), "float16", r"row 0 .* inf: must be finite"),
    ("router_inputs", 16, float("-inf"), "float16", "row 1 .* must be finite"),
    ("embedding", 5 * 7, float("nan"), "float16", "row 7 of the file, 15 of the trace: nan: must be finite"),
    ("token", 4, -2, "int32", "row 4 .* -2: must be a token id, or -1"),
    ("request", 5, 1, "int32", "row 5 .* 1: must be one of the 1 requests"),
    ("request", 5, -1, "int32", "row 5 .* -1: must be one of the 1 requests"),
    ("is_prefill", 6, 2, "uint8", "row 6 .* 2: must be 0 or 1"),
    ("iteration", 0, 0, "int64", "row 0 .* 0: must count up by one, from 3 to 3"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "position", "value", "dtype", "message"), BAD_VALUES)
def test_a_bad_value_is_named_where_it_is_read(folder: Path, field, position, value, dtype, message) -> None:
    poke(folder, field, position, value, dtype)
    trace = Trace.open(folder)
    assert len(trace.rows(field, 0, 8)) == 8  # another shard
    with pytest.raises(TraceError, match=message) as error:
        trace.rows(field, 0, trace.num_rows)
    assert f"{folder / SHARD}: field {field!r}" in str(error.value)
    with pytest.raises(TraceError, match=message):
        list(read_everything(trace))


def test_an_expert_twice_is_refused(folder: Path) -> None:
    experts = Trace.open(folder).rows("experts", 8, 9)[0]
    poke(folder, "experts", 6 + 1, int(experts[2, 0]), "uint16")
    with pytest.raises(TraceError, match=rf"expert {experts[2, 0]} of layer 2 is chosen twice"):
        Trace.open(folder).rows("experts", 8, 16)


def test_iterations_must_count_up(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "trace", iterations([8, 1, 1, 2, 4]), 8)
    for position, value in ((0, 2), (1, 1), (3, 5), (7, 3)):
        write = (folder / SHARD).read_bytes()
        poke(folder, "iteration", position, value, "int64")
        with pytest.raises(TraceError, match=r"field 'iteration': row \d.*: must count up by one, from 1 to 4"):
            Trace.open(folder).rows("iteration", 8, 16)
        with pytest.raises(TraceError, match="must count up by one"):
            list(Trace.open(folder).blocks(["token", "iteration"], max_rows=2))
        (folder / SHARD).write_bytes(write)


BAD_REQUESTS = {
    "not JSON": (b"nonsense\n", "requests.jsonl: line 1: not JSON"),
    "not UTF-8": (b'{"request": 0, "prompt": "\xff"}\n', "is no text in UTF-8"),
    "a list": (b"[]\n", r"line 1: holds \[\]; must be an object"),
    "numbers": (b'{"request": 1, "num_prompt_tokens": 0}\n', "line 1: request=1: must be 0"),
    "category": (b'{"request": 0, "category": 3, "num_prompt_tokens": 0}\n', "category.*3.*: must be strings or null"),
    "tokens": (
        b'{"request": 0, "num_prompt_tokens": -1}\n',
        "num_prompt_tokens=-1: must be a whole number from 0",
    ),
    "truncated": (b'{"request": 0, "num_prompt_tokens": 0}', "line 1: truncated"),
    "deep": (b"[" * 100_000 + b"\n", "line 1: not JSON"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_requests_are_named(folder: Path, case: str) -> None:
    content, message = BAD_REQUESTS[case]
    (folder / "requests.jsonl").write_bytes(content)
    with pytest.raises(TraceError, match=message):
        Trace.open(folder)


def test_lost_requests_are_named(folder: Path) -> None:
    (folder / "requests.jsonl").write_bytes(b"")
    with pytest.raises(TraceError, match=r"field 'request': row 0 .* must be one of the 0 requests"):
        list(read_everything(Trace.open(folder)))
    (folder / "requests.jsonl").unlink()
    with pytest.raises(TraceError, match=r"requests.jsonl: no such file"):
        Trace.open(folder)


@pytest.mark.parametrize("name", ["manifest.json", "requests.jsonl", SHARD])
def test_mutated_files_raise_nothing_but_trace_errors(folder: Path, name: str) -> None:
    path = folder / name
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little") if name == SHARD else len(good)
    rng = random.Random(name)
    refused = 0
    for _ in range(120):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            position = rng.randrange(min(header, len(raw)))
            choice = rng.random()
            if choice < 0.5:
                raw[position] = rng.randrange(256)
            elif choice < 0.8:
                raw[position] = rng.choice(b'0123456789[]{},:"eE.-tfn')
            elif choice < 0.9 and name != SHARD:
                del raw[position:]
                break
            else:
                raw[position : position + 1] = b""
                raw[position:position] = bytes([rng.choice(b"0123456789")])
        path.write_bytes(bytes(raw))
        try:
            for columns in read_everything(Trace.open(folder)):
                assert columns
        except TraceError as error:
            assert str(folder) in str(error)
            refused += 1
    assert refused > 30
