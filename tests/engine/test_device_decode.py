"""Experts that cross the link as they are stored: what a device that decodes is told, with a device that is RAM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zstandard

import expertly
from expertly import api
from expertly.core.codecs import DecodingRates
from expertly.core.errors import BudgetError, ConfigError, TransferError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.engine import division
from expertly.engine.backend_tiered import TieredBackend
from expertly.engine.device_decode import Unpacker
from expertly.engine.division import Division, Request, divide
from expertly.engine.frame_extents import SegmentFrames
from expertly.engine.nvcomp_decoder import NvcompDecoder, why_not
from expertly.engine.stored_reads import StoredSlots
from expertly.hardware.measure_codec import OnDevice
from expertly.model.packing import pack
from expertly.scheduler.presets import get_system
from expertly.store.frames import planes_name
from expertly.store.packed import PackedStore
from tests.engine.conftest import Case, Cases
from tests.engine.frames import LAYERS, content, write_store
from tests.engine.observe import loaded
from tests.engine.test_compressed import compressed_case
from tests.engine.test_tiered import LateStreams
from tests.families import generate

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")


class Decoder:
    """zstd of a device that is RAM; counts its calls."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def decompress(self, stored: Sequence[torch.Tensor], planes: Sequence[torch.Tensor]) -> None:
        self.batches.append(len(stored))
        assert len({plane.numel() for plane in planes}) == 1 and len(stored) == len(planes)
        for frame, plane in zip(stored, planes, strict=True):
            raw = zstandard.ZstdDecompressor().decompress(frame.numpy().tobytes())
            plane.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> PackedStore:
    return write_store(tmp_path_factory.mktemp("planes") / "store")


@pytest.fixture(scope="session")
def planes(cases: Cases, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return compressed_case(cases["qwen3_moe"], tmp_path_factory.mktemp("planes") / "store")


# -- making weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 2, 4, 8, 11, 16])
def test_segments_are_the_bytes_that_were_packed(segments: int, store: PackedStore) -> None:
    """Also those that begin or end within a frame."""
    geometry = Geometry(LAYERS, segments)
    frames, decoder = SegmentFrames(store, geometry), Decoder()
    unpacker = Unpacker(frames, geometry, decoder, CPU)
    for layer, shape in enumerate(LAYERS):
        file = store.layer_extent(layer)[0].read_bytes()
        for expert in range(shape.num_experts):
            whole = content(layer, expert).tobytes()
            for segment in range(segments):
                nbytes = geometry.segment_nbytes(layer)
                begin = frames.of(layer, expert, segment).cover_begin
                cover = torch.frombuffer(bytearray(file[begin:]), dtype=torch.uint8)
                target = torch.zeros(nbytes, dtype=torch.uint8)
                unpacker.unpack(layer, expert, segment, cover, target)
                assert target.numpy().tobytes() == whole[segment * nbytes : (segment + 1) * nbytes]
                assert unpacker.link_nbytes(layer, expert, segment) % 4096 == 0
    assert min(decoder.batches) >= 1
    assert unpacker.nbytes < 3 * max(geometry.segment_nbytes(layer) for layer in range(3)) + (1 << 16)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("segments", [1, 4])
def test_logits_are_those_of_experts_as_they_are(
    dtype: str, segments: int, cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, logits = cases["mixtral"], []
    pack(case.folder, tmp_path / "none", dtype, codec="none")
    pack(case.folder, tmp_path / "planes", dtype, codec="planes")
    with loaded(tmp_path / "none", memory="60%", segments=segments) as model, torch.no_grad():
        logits.append(model(torch.tensor(case.prompts[:1])).logits)
    Machine(monkeypatch, 400)
    with loaded(tmp_path / "planes", memory="60%", segments=segments) as model, torch.no_grad():
        logits.append(model(torch.tensor(case.prompts[:1])).logits)
        assert expertly.stats(model).as_dict()["bytes_device_decoded"] > 0
    assert torch.equal(*logits)


# -- the backend -----------------------------------------------------------------------------------------------------


class Machine:
    """Models load with a device that decodes, behind it stored experts in a share of all experts' decoded bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host_share: int) -> None:
        self.decoder = Decoder()
        self.backends: list[TieredBackend] = []

        def make(device: Any, store: Any, geometry: Any, slots: Any, dtype: Any, *rest: Any) -> TieredBackend:
            nbytes = geometry.nbytes * host_share // 100
            backend = TieredBackend(device, LateStreams(), store, geometry, slots, dtype, 0, None, nbytes, self.decoder)
            self.backends.append(backend)
            return backend

        monkeypatch.setattr(api, "make_backend", make)


@pytest.mark.parametrize("host_share", [300, 60])
@pytest.mark.parametrize("segments", [1, 4])
def test_tokens_are_the_reference(
    host_share: int, segments: int, planes: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts as tiny as these take whole pages in host memory: three times their bytes hold all of them."""
    machine = Machine(monkeypatch, host_share if segments == 1 else 4 * host_share)
    with loaded(planes.store, memory="25%", segments=segments) as model:
        for _ in range(2):
            assert generate(model, planes.prompts) == planes.tokens
        (backend,) = machine.backends
        backend.tier.check()
        moved, stats = backend.stats(), expertly.stats(model).as_dict()
        assert moved["device_decoded_nbytes"] == stats["bytes_loaded"] > 0
        assert moved["decoded_nbytes"] == 0, "the host decodes nothing"
        assert moved["copied_nbytes"] % 4096 == 0
        assert stats["compressed_bytes"] == backend.compressed_nbytes == backend.tier.memory_nbytes
        before = moved["disk_nbytes"]
        assert generate(model, planes.prompts) == planes.tokens
        if host_share == 300:
            assert backend.stats()["disk_nbytes"] == before, "host memory holds them all by now"
            assert 0 < backend.tier.resident_nbytes <= backend.tier.memory_nbytes
        else:
            assert backend.stats()["disk_nbytes"] > before


def test_several_devices_decode_each_its_own(planes: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 300)
    with loaded(planes.store, memory="75%", devices="cpu:0,cpu:1") as model:
        assert generate(model, planes.prompts) == planes.tokens
        assert len(machine.backends) == 2
        assert all(backend.stats()["device_decoded_nbytes"] > 0 for backend in machine.backends)


def test_fewer_bytes_cross_the_link(tmp_path: Path) -> None:
    """Of experts large enough that pages do not matter."""
    layers = (LayerGeometry(2, 1, hidden_size=256, intermediate_size=256, num_matrices=3, itemsize=2),)
    store, geometry = write_store(tmp_path / "store", layers), Geometry(layers, 1)
    unpacker = Unpacker(SegmentFrames(store, geometry), geometry, Decoder(), CPU)
    assert unpacker.link_nbytes(0, 0, 0) < 0.72 * layers[0].expert_nbytes


@pytest.mark.parametrize("segments", [1, 4])
def test_loading_ahead_changes_no_token(segments: int, planes: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 400)
    with loaded(planes.store, memory="50%", segments=segments, system="fmoe", maps=None, matcher="inline") as model:
        for _ in range(2):
            assert generate(model, planes.prompts) == planes.tokens
        engine = api.handle(model).engine
        assert sum(counters.decode.prefetched for counters in engine.scheduler.counters) > 0
        machine.backends[0].tier.check()


def test_damage_is_refused_before_the_device_sees_it(
    cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = compressed_case(cases["qwen3_moe"], tmp_path / "store")
    machine = Machine(monkeypatch, 100)
    path = case.store / planes_name(1)
    whole = path.read_bytes()
    with loaded(case.store, memory="75%", system="on-demand") as model:
        path.write_bytes(bytes(byte ^ 255 for byte in whole))
        for _ in range(2):
            with pytest.raises(TransferError, match=rf"{path.name}: frame 0 of expert \d: checksum"):
                generate(model, case.prompts)
            api.handle(model).engine.scheduler.check()
            machine.backends[0].tier.check()
        path.write_bytes(whole)
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens


def test_host_memory_for_less_than_a_tokens_experts(store: PackedStore) -> None:
    geometry = Geometry(LAYERS, 1)
    with pytest.raises(BudgetError, match=r"memory=9000 bytes: one token's experts, as they are stored, take \d+"):
        StoredSlots(SegmentFrames(store, geometry), geometry, 9000)


# -- what is asked for, and what is chosen ---------------------------------------------------------------------------


def divided(store: PackedStore, compressed: str, device: str = "cuda", host_memory: str = "80%") -> Division:
    request = Request(memory="50%", host_memory=host_memory, compressed=compressed)
    return divide(store, [store.geometry()], get_system("lru"), request, [torch.device(device)])


def test_where_no_device_can_decode(planes: Case, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PackedStore.open(planes.store)
    with pytest.raises(ConfigError, match="compressed='device': only an accelerator decodes"):
        divided(store, "device", "cpu")
    monkeypatch.setattr(division, "why_not", lambda: "nvCOMP is not installed")
    with pytest.raises(ConfigError, match="compressed='device': nvCOMP is not installed; accepted without it"):
        divided(store, "device")
    with pytest.raises(ConfigError, match="compressed='device': the packed store is in codec none"):
        divided(PackedStore.open(cases["qwen3_moe"].store), "device")
    why = divided(store, "auto").compressed.why
    assert why.endswith("; the host decodes: nvCOMP is not installed")


def test_all_host_memory_is_for_stored_experts_where_the_device_decodes(
    planes: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PackedStore.open(planes.store)
    monkeypatch.setattr(division, "why_not", lambda: None)
    monkeypatch.setattr(division, "decoding_rates", lambda store, device: None)
    found = divided(store, "device")
    assert found.host_memory == 0 and found.compressed_nbytes == [store.geometry().nbytes * 8 // 10]
    assert found.compressed.share == 1.0 and found.compressed.why == "it was asked for that the device decodes"


@pytest.mark.parametrize(("link", "is_device"), [(1e10, True), (1e12, False)])
def test_auto_decodes_where_measuring_says(
    link: float, is_device: bool, planes: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PackedStore.open(planes.store)
    monkeypatch.setattr(division, "why_not", lambda: None)
    monkeypatch.setattr(division, "decoding_rates", lambda store, device: DecodingRates(0.7, link, 4e9, 6e10))
    found = divided(store, "auto", host_memory="100%")
    assert (found.host_memory == 0) == is_device
    where = "decoded on the device weights come in 0.87 of the time" if is_device else ", so the host decodes"
    assert where in found.compressed.why and "and the device 60.00 GB/s of weights" in found.compressed.why


def test_a_device_that_makes_other_bits_is_not_used(planes: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PackedStore.open(planes.store)
    geometry = store.geometry()
    frames = SegmentFrames(store, geometry)

    class Wrong(Decoder):
        def decompress(self, stored: Sequence[torch.Tensor], planes: Sequence[torch.Tensor]) -> None:
            super().decompress(stored, planes)
            planes[-1][-1] ^= 1

    def measure(store: PackedStore, device: torch.device) -> DecodingRates:
        OnDevice(LateStreams(), Unpacker(frames, geometry, Wrong(), CPU), frames, geometry, CPU).measure(store, 0.02)
        raise AssertionError("it was used")

    monkeypatch.setattr(division, "why_not", lambda: None)
    monkeypatch.setattr(division, "decoding_rates", measure)
    with pytest.raises(ConfigError, match=r"compressed='device': .*decodes an expert to other bits than the host"):
        divided(store, "device")
    found = divided(store, "auto")
    assert found.host_memory != 0
    assert "; the host decodes: " in found.compressed.why and "other bits" in found.compressed.why


def test_what_nvcomp_refuses_fails_the_request() -> None:
    library = Library()
    decoder = NvcompDecoder(torch.device("cuda", 0), 5, int, bool, library)
    frame = torch.frombuffer(bytearray(zstandard.compress(bytes(500))), dtype=torch.uint8)

    def refuse(*args: Any, **options: Any) -> None:
        raise ValueError("out is too small")

    library.decode = refuse  # type: ignore[method-assign]
    with pytest.raises(TransferError, match=r"nvCOMP cannot decompress 1 frames \(out is too small\)"):
        decoder.decompress([frame], [torch.zeros(500, dtype=torch.uint8)])
    library.Codec = refuse  # type: ignore[method-assign, assignment]
    with pytest.raises(ConfigError, match=r"nvCOMP cannot be used on cuda:0 \(out is too small\)"):
        NvcompDecoder(torch.device("cuda", 0), 5, int, bool, library)


def test_measuring_runs_what_is_used(planes: Case) -> None:
    store, streams = PackedStore.open(planes.store), LateStreams()
    geometry = store.geometry()
    frames, decoder = SegmentFrames(store, geometry), Decoder()
    on_device = OnDevice(streams, Unpacker(frames, geometry, decoder, CPU), frames, geometry, CPU)
    copying, unpacking = on_device.measure(store, 0.02)
    assert copying > 0 and unpacking > 0 and decoder.batches
    assert streams.num_copies >= 4 * 8


# -- nvCOMP ----------------------------------------------------------------------------------------------------------


class Library:
    """What is used of nvCOMP, decoding in RAM; its arrays are lists of tensors."""

    __version__ = "6.0.0"
    BitstreamKind = SimpleNamespace(RAW="raw")

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.configs = 0

    def Codec(self, **options: Any) -> Library:
        self.made = options
        return self

    def as_arrays(self, sources: list[torch.Tensor], cuda_stream: int = 0) -> list[torch.Tensor]:
        assert cuda_stream == self.made["cuda_stream"]
        return sources

    def decompression_config(self, sources: list[torch.Tensor]) -> object:
        self.configs += 1
        return ("config", len(sources))

    def decode(self, sources: list[torch.Tensor], out: list[torch.Tensor], decompression_config: object) -> None:
        assert decompression_config == ("config", len(sources))
        Decoder().decompress(sources, out)


def test_nvcomp_reads_raw_zstd_on_the_copy_stream_and_asks_for_sizes_once() -> None:
    library, past = Library(), set[int]()
    marks = iter(range(100))
    decoder = NvcompDecoder(torch.device("cuda", 1), 77, lambda: next(marks), past.__contains__, library)
    assert library.made == {"algorithm": "Zstd", "bitstream_kind": "raw", "device_id": 1, "cuda_stream": 77}
    raws = [bytes([number]) * 5000 for number in range(3)]
    frames = [torch.frombuffer(bytearray(zstandard.compress(raw)), dtype=torch.uint8) for raw in raws]
    for num in (3, 2, 3, 2, 3):
        out = [torch.zeros(5000, dtype=torch.uint8) for _ in range(num)]
        decoder.decompress(frames[:num], out)
        assert [plane.numpy().tobytes() for plane in out] == raws[:num]
    assert library.configs == 2, "once for each number of planes"
    assert len(decoder._queued) == 5, "the device may still read the tables"
    past.update(range(4))
    decoder.decompress(frames, [torch.zeros(5000, dtype=torch.uint8) for _ in range(3)])
    assert len(decoder._queued) == 2


def test_nvcomp_that_is_too_old_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def importing(result: Any) -> None:
        def load(name: str) -> Any:
            assert name == "nvidia.nvcomp"
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr("expertly.engine.nvcomp_decoder.import_module", load)

    importing(SimpleNamespace(__version__="6.1.0"))
    assert why_not() is None
    importing(SimpleNamespace(__version__="5.1.0"))
    assert why_not() == "nvCOMP 5.1.0 is installed; accepted: 6 and later"
    importing(ImportError("no"))
    assert "not installed in this Python; `pip install` nvidia-nvcomp-cu12" in str(why_not())


def test_nvcomp_has_what_is_used_of_it() -> None:
    """Where it is installed, with or without a device."""
    nvcomp = pytest.importorskip("nvidia.nvcomp")
    if why_not() is not None:
        pytest.skip(str(why_not()))
    assert nvcomp.BitstreamKind.RAW is not None
    for name in ("algorithm", "bitstream_kind", "device_id", "cuda_stream"):
        assert f"{name}:" in nvcomp.Codec.__init__.__doc__
    assert "out: object = None" in nvcomp.Codec.decode.__doc__
    assert "decompression_config: " in nvcomp.Codec.decode.__doc__
    assert "srcs: nvidia.nvcomp.nvcomp_impl.BatchArray" in nvcomp.Codec.decompression_config.__doc__
    assert "sources: list[object], cuda_stream: int" in nvcomp.as_arrays.__doc__
