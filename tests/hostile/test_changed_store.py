"""A store that changes under a model that runs: its text is the model's, or there is an error that names the file."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertly.api import handle
from expertly.core.errors import ExpertlyError, NanError, TransferError
from expertly.core.messages import Span
from expertly.engine import slots
from expertly.engine.runtime import Engine
from expertly.engine.transfer import Readers
from expertly.model.packing import pack
from expertly.store.packed import PackedStore, experts_name
from expertly.store.sums import CHECK_EVERY
from tests.engine import observe
from tests.engine.disk import Preads
from tests.families import generate, make_checkpoint, make_prompts
from tests.store.builders import write_store
from tests.tables import crossed

PROMPTS = make_prompts(2, length=14)
loaded = partial(observe.loaded, system="lru")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changed")
    checkpoint = make_checkpoint("qwen3_moe", folder / "model", tokenizer=True)
    return pack(checkpoint, folder / "packed").folder


@pytest.fixture
def store(packed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(packed, tmp_path / "store")


# -- what is done to a file --------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """A bit of every 64th byte of its second half, in place."""
    with path.open("r+b") as file:
        raw = np.frombuffer(path.read_bytes(), np.uint8).copy()
        raw[len(raw) // 2 :: 64] ^= 0x40
        file.write(raw.tobytes())


def flip_in_secret(path: Path) -> None:
    """And set its times back."""
    about = path.stat()
    flip(path)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def replace_by(path: Path, change: Callable[[Path], Any]) -> None:
    """Another file takes its name."""
    other = path.with_name("other")
    shutil.copy(path, other)
    change(other)
    other.replace(path)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


WRONG: dict[str, Callable[[Path], Any]] = {
    "bits flip": flip,
    "bits flip, with the times of before": flip_in_secret,
    "it is cut": truncate,
    "it is emptied": lambda path: os.truncate(path, 0),
    "it grows": lambda path: os.truncate(path, path.stat().st_size + 4096),
    "it is overwritten by zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}

RIGHT: dict[str, Callable[[Path], Any]] = {
    "another takes its name": lambda path: replace_by(path, flip),
    "it is deleted": Path.unlink,
    "it gets another name": lambda path: path.rename(path.with_name("other")),
    "it gets a second name": lambda path: path.with_name("second").hardlink_to(path),
    "it is touched": Path.touch,
    "its mode changes": lambda path: path.chmod(0o600),
    "it is overwritten by the same": lambda path: path.write_bytes(path.read_bytes()),
}

HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "four segments": {"system": "moepic:segments=4"},
    "prefetched": {"system": "expertly"},
    "every read": {"verify": "always"},
}


def run(model: Any, right: list[list[int]], num: int = 3) -> None:
    """Generate some times. Raises what `generate` raises; never is a token wrong."""
    for _ in range(num):
        assert generate(model, PROMPTS) == right


@pytest.mark.parametrize("how", HOW)
def test_wrong_bytes_are_an_error_before_they_are_text(how: str, store: Path) -> None:
    """One that names the file, until that has its bytes back, and the model goes on."""
    path, _ = PackedStore.open(store).extents[1]
    whole = path.read_bytes()
    with loaded(store, **HOW[how]) as model:
        right = generate(model, PROMPTS)
        for name, change in WRONG.items():
            change(path)
            for _ in range(2):
                with pytest.raises(TransferError, match=rf"{path.name}: was written to while in use"):
                    run(model, right)
            path.write_bytes(whole)
            run(model, right, 1)
            handle(model).engine.scheduler.check()
            assert path.read_bytes() == whole, name


@pytest.mark.parametrize("name", RIGHT)
def test_right_bytes_stay_the_models_text(name: str, store: Path) -> None:
    with loaded(store) as model:
        right = generate(model, PROMPTS)
        RIGHT[name](PackedStore.open(store).extents[1][0])
        run(model, right)


def test_what_was_read_whole_may_change(store: Path) -> None:
    """The model has it in its own memory: the file is no part of it any more."""
    files = ["dense.safetensors", "config.json", "manifest.json", "tokenizer.json"]
    with loaded(store) as model:
        right = generate(model, PROMPTS)
        for change, file in crossed([*WRONG.values(), *RIGHT.values()], files):
            whole = (store / file).read_bytes()
            change(store / file)
            run(model, right, 1)
            (store / file).write_bytes(whole)


# -- what no time of a file shows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 2, 4, 8])
@pytest.mark.parametrize("is_prefetch", [False, True])
def test_a_block_that_changes_unseen_is_found_within_64_reads_of_it(
    segments: int, is_prefetch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a disk changes it. Reads of it are counted from then on; it is read whole, or in parts, among others."""
    store = write_store(tmp_path / "m")
    geometry, dice = store.geometry(segments), random.Random(segments)
    nbytes, num_experts = geometry.unit_nbytes[0], geometry.layers[0].num_experts
    memory = memoryview(slots._mapped(num_experts * segments * nbytes).numpy())
    changed_at = store.extents[0][1] + geometry.layers[0].expert_nbytes  # in the file, where expert 1 begins
    is_changed = False

    def pread(file: int, buffer: memoryview, offset: int) -> int:
        num = os.preadv(file, [buffer], offset)
        if is_changed and offset <= changed_at < offset + num:
            buffer[changed_at - offset] ^= 1
        return num

    Preads(monkeypatch, pread)

    longest = 0
    for num_before in (0, 1, 47, 63, 64, 200):
        with closing(Readers(store.layer_file, geometry, lambda layer: memory)) as readers:

            def read(expert: int, readers: Readers = readers) -> bool:
                """Whether the read had the expert's first segment."""
                segment = dice.randrange(segments)
                span = Span(0, expert, segment, dice.randint(1, segments - segment), expert * segments + segment)
                (readers.prefetch if is_prefetch else readers.submit)([span])
                readers.wait()
                return not span.segment

            for _ in range(num_before):
                read(dice.randrange(num_experts))
            is_changed, is_found, num_reads = True, False, 0
            while not is_found:
                try:
                    num_reads += read(1)
                except TransferError as error:
                    assert "expert 1, segment" in str(error) and "damaged" in str(error)
                    is_found, num_reads = True, num_reads + 1
                assert num_reads <= CHECK_EVERY
            is_changed, longest = False, max(longest, num_reads)
    assert 1 < longest <= CHECK_EVERY == 64


# -- while loading, NaN ----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["dense.safetensors", "config.json", "tokenizer.json"])
def test_what_changes_while_a_model_is_loaded_is_told(file: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Engine.__init__

    def change_first(*args: Any, **named: Any) -> None:
        with (store / file).open("ab") as opened:
            opened.write(b" ")
        made(*args, **named)

    monkeypatch.setattr(Engine, "__init__", change_first)
    message = rf"{file}: was written to while|{file}.*bytes at the end|cannot be read"
    with pytest.raises(ExpertlyError, match=message), loaded(store):
        pass


@pytest.mark.parametrize("name", ["bits flip", "another takes its name", "it grows"])
def test_a_checkpoint_that_changes_while_it_is_packed_is_told(name: str, tmp_path: Path) -> None:
    source = make_checkpoint("qwen3_moe", tmp_path / "model")
    (path,) = source.glob("*.safetensors")
    changes = [(WRONG | RIGHT)[name]]

    def progress(done: int, total: int) -> None:
        if 0 < done < total and changes:
            changes.pop()(path)

    with pytest.raises(ExpertlyError, match=r"changed while they were packed|truncated|cannot be read"):
        pack(source, tmp_path / "store", progress=progress)
    assert not changes and not (tmp_path / "store").exists() and not (tmp_path / "store.partial").exists()


@pytest.mark.parametrize("file", ["dense.safetensors", experts_name(2)])
def test_nan_is_not_blamed_on_the_checkpoint_where_the_store_has_changed(file: str, store: Path) -> None:
    path = store / file
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 :] = np.full(len(raw) - len(raw) // 2, 0xFF, np.uint8).tobytes()
    path.write_bytes(raw)
    with (
        loaded(store, verify="never") as model,
        pytest.raises(NanError, match=rf"gave NaN: .*{file}: checksum .*damaged"),
    ):
        generate(model, PROMPTS)
