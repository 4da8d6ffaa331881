"""Packing in planes: the same bits as without, found again, and chosen where it is faster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from expertly.core.errors import ConfigError
from expertly.model import packing as packing_module
from expertly.model.packing import pack, pack_cached
from expertly.store.codec_choice import CodecChoice
from expertly.store.frames import FrameDecoder
from expertly.store.packed import PackedStore
from expertly.store.writer import partial_folder
from tests.families import make_checkpoint
from tests.model.checkpoints import make_fused_checkpoint, make_mxfp4_checkpoint
from tests.store.builders import files_of


def experts_of(store: PackedStore) -> Iterator[bytes]:
    """The bytes of all experts, as they are computed with."""
    decoder = FrameDecoder()
    for layer, geometry in enumerate(store.manifest.layers):
        path, offset = store.layer_extent(layer)
        raw, index = memoryview(path.read_bytes()), store.frame_index(layer)
        for expert in range(geometry.num_experts):
            if index is None:
                start = offset + expert * geometry.expert_nbytes
                yield bytes(raw[start : start + geometry.expert_nbytes])
                continue
            whole = bytearray(geometry.expert_nbytes)
            for frame in range(index.num_frames):
                begin, nbytes = index.extent(expert, frame)
                out = memoryview(whole)[frame * index.frame_nbytes :][: index.frame_nbytes]
                decoder.decode(index, expert, frame, raw[begin : begin + nbytes], out)
            yield bytes(whole)


@pytest.mark.parametrize(
    ("dtype", "ratio"), [("bfloat16", 0.72), ("float16", 0.72), ("float32", 0.37)], ids=lambda value: str(value)
)
def test_the_demo_model_loses_no_bit_and_more_than_a_quarter_of_its_size(
    tmp_path: Path, dtype: str, ratio: float
) -> None:
    store = pack_cached("demo", dtype, tmp_path, codec="planes")
    assert store.codec == "planes" and store.ratio <= ratio
    assert store.folder.name.endswith(f"-{dtype}-planes")
    store.verify(full=True)
    plain = pack_cached("demo", dtype, tmp_path, codec="none")
    assert list(experts_of(store)) == list(experts_of(plain))
    assert (store.folder / "dense.safetensors").read_bytes() == (plain.folder / "dense.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["plain", "fused", "quantized"])
def test_every_layout_of_a_checkpoint_can_be_packed_in_planes(tmp_path: Path, kind: str) -> None:
    if kind == "quantized":
        source = make_mxfp4_checkpoint(tmp_path / "source")
    elif kind == "fused":
        source = make_fused_checkpoint("jamba", tmp_path / "source")
    else:
        source = make_checkpoint("deepseek_v3", tmp_path / "source")
    store = pack(source, tmp_path / "store", codec="planes")
    plain = pack(source, tmp_path / "plain", codec="none")
    assert list(experts_of(store)) == list(experts_of(plain))
    store.verify(full=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mixtral", tmp_path_factory.mktemp("model") / "source", tokenizer=True)


def test_what_is_packed_is_used_again(tmp_path: Path, source: Path) -> None:
    store = pack_cached(source, cache_dir=tmp_path, codec="planes")
    assert store.why_codec == "it was asked for"
    again = pack_cached(source, cache_dir=tmp_path, progress=lambda *now: pytest.fail("packed again"))
    assert (again.folder, again.codec, again.why_codec) == (store.folder, "planes", "the model is packed in it")
    direct = pack_cached(store.folder)
    assert (direct.codec, direct.why_codec) == ("planes", "the packed store is in it")
    plain = pack_cached(source, cache_dir=tmp_path, codec="none")
    assert plain.codec == "none" and plain.folder != store.folder
    both = pack_cached(source, cache_dir=tmp_path, progress=lambda *now: pytest.fail("packed again"))
    assert both.codec == "none" and "too few for measuring" in both.why_codec


def test_a_small_model_is_packed_without_measuring(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_module, "disk_rate_at", lambda folder: pytest.fail("measured"))
    store = pack(source, tmp_path / "store")
    assert store.codec == "none" and "too few for measuring to pay" in store.why_codec
    assert pack(source, tmp_path / "store").why_codec == "the model is packed in it"


@pytest.mark.parametrize("codec", ["none", "planes"])
def test_auto_packs_what_measuring_chose(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    monkeypatch.setattr(packing_module, "choose_for", lambda *args: CodecChoice(codec, "it is so here"))
    for store in (pack_cached(source, cache_dir=tmp_path), pack(source, tmp_path / "store")):
        assert (store.codec, store.why_codec) == (codec, "it is so here")
        assert PackedStore.open(store.folder).codec == codec
    assert not list(tmp_path.rglob("*.partial"))


def test_auto_measures_between_two_stores_on_their_own_bytes(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = {codec: pack_cached(source, cache_dir=tmp_path, codec=codec) for codec in ("none", "planes")}
    seen = []

    def choose(layers: object, sample: object, disk: object) -> CodecChoice:
        seen.append((layers, sample().ratio, disk()))
        return CodecChoice("planes", "it is so here")

    monkeypatch.setattr(packing_module, "choose_for", choose)
    store = pack_cached(source, cache_dir=tmp_path, progress=lambda *now: pytest.fail("packed again"))
    assert (store.folder, store.why_codec) == (stores["planes"].folder, "it is so here")
    [(layers, ratio, disk)] = seen
    assert layers == store.manifest.layers and disk > 0
    assert ratio == pytest.approx(store.ratio, abs=0.1)


def test_what_was_begun_is_finished_in_its_codec(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path / "store", progress=stop, codec="planes")
    assert partial_folder(tmp_path / "store").is_dir()
    monkeypatch.setattr(packing_module, "choose_for", lambda *args: pytest.fail("chosen anew"))
    first: list[int] = []
    store = pack(source, tmp_path / "store", progress=lambda done, total: first.append(done))
    assert (store.codec, store.why_codec) == ("planes", "packing was begun in it") and first[0] > 0
    assert files_of(store.folder) == files_of(pack(source, tmp_path / "whole", codec="planes").folder)


def test_a_store_in_another_codec_is_refused(tmp_path: Path, source: Path) -> None:
    pack(source, tmp_path / "store", codec="planes")
    for attempt in (
        lambda: pack(source, tmp_path / "store", codec="none"),
        lambda: pack_cached(tmp_path / "store", codec="none"),
    ):
        with pytest.raises(ConfigError, match=r"codec='none': the packed store .* is in planes; pack .* again"):
            attempt()
    with pytest.raises(ConfigError, match="codec='zip': unknown; accepted: none, planes, auto"):
        pack_cached(source, cache_dir=tmp_path, codec="zip")
