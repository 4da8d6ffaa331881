"""Files of machines and models: what is shipped, what is refused and how, and that writing and reading are inverse."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from expertly.core.costs import CodecCosts, HostCompute, Link, MeasuredCompute
from expertly.core.errors import HardwareError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.sim.hardware import GEOMETRY_NAMES, HARDWARE_NAMES, Hardware, PredictorCosts, read_geometry
from tests.sim.drive import toy

LAYER = LayerGeometry(8, 2, 32, 64, 3, 2, "mxfp4", 32, 1632)
TIMES = ((1, 4, 64), (10, 20, 30), (1, 2, 3), (100, 200, 300), (110, 210, 310), (5, 6, 7))
FULL = toy(
    name="a machine",
    efficiency=0.75,
    launch_ns=1,
    link=Link(math.inf, 0, 0, 5, 1 << 20, prefetches_when_called=True, arrive_together=False),
    disk=Link(3.5e9, 100_000, 7),
    host_memory_nbytes=1 << 34,
    compute=MeasuredCompute('a "model" with a \\ and ünïcode 🦀', "bfloat16", 2, 32, 3, LAYER, *TIMES, 11, 17, 1.25),
    predictor=PredictorCosts(31_000, math.inf, 5e9),
    codec=CodecCosts(0.68, 1.5e9, 4, 3, 0.5),
    host=HostCompute(3.5e10, 5e11, 50_000, 1.05),
    format_nbytes_per_s=1.5e10,
)


@pytest.mark.parametrize("name", HARDWARE_NAMES)
def test_shipped_profiles_are_read_and_every_number_has_its_source_beside_it(name: str):
    hardware = Hardware.read(name)
    assert hardware.name == name and hardware.compute is None
    text = (Path(__file__).parents[2] / "src" / "expertly" / "data" / "hardware" / f"{name}.toml").read_text()
    lines = text.splitlines() if name != "infinite" else []
    for i, line in enumerate(lines):
        if re.match(r"\w+ = [\d.]", line):
            assert "#" in line or lines[i - 1].startswith("#"), line


def test_a_file_without_predictor_costs_has_the_documented_ones(tmp_path: Path):
    path = Path(written(tmp_path))
    text = path.read_text()
    path.write_text(text[: text.index("[predictor]")])
    assert Hardware.read(str(path)) == replace(FULL, predictor=PredictorCosts(), codec=None, host=None)
    assert Hardware.read("rtx3090").predictor == PredictorCosts()
    infinite = Hardware.read("infinite")
    assert infinite.predictor.work_ns(1 << 60, 1 << 60) == infinite.predictor.call_ns == 0
    assert infinite.link.occupies_ns(1 << 60) == 0


@pytest.mark.parametrize("hardware", [FULL, replace(FULL, compute=None, disk=None, host_memory_nbytes=None, host=None)])
def test_a_written_file_is_read_back(hardware: Hardware, tmp_path: Path):
    path = tmp_path / "folder" / "machine.toml"
    hardware.write(path, ["made by\na test"])
    assert Hardware.read(str(path)) == hardware
    assert path.read_text().startswith("# made by a test\n")
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HardwareError, match=r"machine.toml: cannot be written"):
        FULL.write(tmp_path / "file" / "machine.toml")


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (Hardware.read, r"hardware='mixtral': .*accepted: rtx3090, .*infinite, or a TOML file"),
        (read_geometry, r"geometry='mixtral': .*accepted: gpt-oss-20b, .*or a TOML file"),
    ],
)
def test_an_unknown_name_lists_the_shipped_ones(read: Callable[[str], object], message: str):
    with pytest.raises(HardwareError, match=message):
        read("mixtral")


def written(tmp_path: Path, *changes: tuple[str, str]) -> str:
    """A file that differs from a good one."""
    path = tmp_path / "machine.toml"
    FULL.write(path)
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("efficiency = 0.75\n", "", "lacks efficiency"),
        ("efficiency = 0.75", "efficiency = 1.5", r"efficiency=1.5: must be a number above 0 to 1"),
        ("efficiency = 0.75", "efficiency = nan", r"efficiency=nan: must be"),
        ("efficiency = 0.75", "efficiency = true", r"efficiency=True: must be"),
        ("launch_ns = 1", "launch_ns = -1", r"launch_ns=-1: must be a whole number from 0"),
        ("launch_ns = 1", "launch_ns = 1.5", r"launch_ns=1.5: must be a whole number"),
        ("launch_ns = 1", "launch_ns = 1\ncolour = 'red'", r"colour='red': unknown key; accepted: name, memory"),
        ("latency_ns = 100000", "latency_ns = 100000\nspeed = 1", r"disk.speed=1: unknown key; accepted: nbytes_per_s"),
        ("nbytes_per_s = 3500000000.0", "nbytes_per_s = 0", r"disk.nbytes_per_s=0: must be a number from 1 .* or inf"),
        ("when_called = true", "when_called = 1", "link.prefetches_when_called=1: must be true or false"),
        ("name = ", "name = 3 #", "name=3: must be a string"),
        ("[link]", "[[link]]", r"link=\[\{.*must be a table"),
        ("tokens = [1, 4, 64]", "tokens = [4, 1, 64]", r"compute.tokens=\[4, 1, 64\]: must rise"),
        ("tokens = [1, 4, 64]", "tokens = []", r"compute.tokens=\[\]: must be a list of whole numbers from 1"),
        ("head_ns = [1, 2, 3]", "head_ns = [1, 2]", r"compute.head_ns=\[1, 2\]: must have 3 numbers, has 2"),
        ("slowdown_while_loading = 1.25", "slowdown_while_loading = 0.9", "must be a number from 1 to"),
        ("top_k = 2", "top_k = 9", "more than the 8 experts"),
        ("num_matrices = 3", "num_matrices = 4", "must be 2 or 3"),
        ("itemsize = 2", "itemsize = 0.5", r"compute.layer.itemsize=0.5: must be a whole number from 1"),
        ("ratio = 0.68", "ratio = 0", r"codec.ratio=0: must be a number above 0 to 2"),
        ("threads = 4", "threads = 0", r"codec.threads=0: must be a whole number from 1"),
        ("threads_beside = 3", "threads_beside = 5", r"codec.threads_beside=5: at most the 4 threads"),
        ("read_processors = 0.5", "read_processors = 4.5", r"codec.read_processors=4.5: must be a number from 0 to 4"),
        ("link_slowdown = 1.05\n", "", r"lacks host.link_slowdown"),
        ("name = ", "name : ", "not TOML"),
    ],
)
def test_errors_name_file_key_and_value(tmp_path: Path, old: str, new: str, message: str):
    path = written(tmp_path, (old, new))
    with pytest.raises(HardwareError, match=message) as error:
        Hardware.read(path)
    assert path in str(error.value)


def test_a_host_tier_too_small_needs_a_disk(tmp_path: Path):
    replace(FULL, disk=None).write(tmp_path / "machine.toml")
    with pytest.raises(HardwareError, match=r"host_memory_nbytes=\d+: .*needs a \[disk\]"):
        Hardware.read(str(tmp_path / "machine.toml"))
    replace(FULL, disk=None, host_memory_nbytes=None).write(tmp_path / "machine.toml")
    with pytest.raises(HardwareError, match=r"host=.*: computes beside an accelerator, .*a \[disk\]"):
        Hardware.read(str(tmp_path / "machine.toml"))


def test_files_that_are_no_descriptions_are_refused(tmp_path: Path):
    for content, message in (
        (b"\xff\xfe", "no text in UTF-8"),
        (b"a = 1\n" * 200_000, "1200000 bytes; accepted"),
        (b"", "lacks name"),
    ):
        (tmp_path / "machine.toml").write_bytes(content)
        with pytest.raises(HardwareError, match=message):
            Hardware.read(str(tmp_path / "machine.toml"))
    with pytest.raises(HardwareError, match="a folder; must be a file"):
        Hardware.read(str(tmp_path))


def test_damaged_files_are_read_or_refused_and_never_crash(tmp_path: Path):
    text = Path(written(tmp_path)).read_text()
    dice = random.Random(0)
    path = tmp_path / "machine.toml"
    tokens = ["", "-1", "nan", "inf", "1e400", "9" * 30, "[]", "{}", '"x"', "true", "1979-05-27", "\n", "[a]", "="]
    num_refused = 0
    for _ in range(200):
        place = dice.randrange(len(text))
        damaged = text[:place] + dice.choice(tokens) + text[place + dice.randrange(8) :]
        path.write_text(damaged)
        try:
            Hardware.read(str(path))
        except HardwareError:
            num_refused += 1
    assert num_refused > 60


# -- geometry files ----------


PUBLISHED = {  # billions of parameters in all, vocabulary, layers, experts, top-k
    "gpt-oss-20b": (20.9, 201088, 24, 32, 4),
    "gpt-oss-20b-mxfp4": (20.9, 201088, 24, 32, 4),
    "qwen3-30b-a3b-int4": (30.5, 151936, 48, 128, 8),
    "qwen3-30b-a3b-fp8": (30.5, 151936, 48, 128, 8),
    "deepseek-v3-fp8": (671.0, 129280, 58, 256, 8),
    "deepseek-v2-lite": (15.7, 102400, 26, 64, 6),
    "qwen1.5-moe": (14.3, 151936, 24, 60, 4),
    "mixtral-8x7b": (46.7, 32000, 32, 8, 2),
    "phi-3.5-moe": (41.9, 32064, 32, 16, 2),
}

GOOD = """
name = "mine"
num_layers = 3
[layer]
num_experts = 8
top_k = 2
hidden_size = 32
intermediate_size = 16
num_matrices = 3
itemsize = 2
"""


@pytest.mark.parametrize("name", GEOMETRY_NAMES)
def test_all_weights_together_are_the_published_number(name: str):
    found = read_geometry(name)
    billions, vocabulary, num_layers, num_experts, top_k = PUBLISHED[name]
    layer = found.layers[0]
    assert (found.name, len(found.layers), layer.num_experts, layer.top_k) == (name, num_layers, num_experts, top_k)
    assert found.dense is not None
    weights = Geometry(tuple(one.unquantised() for one in found.layers))
    nbytes = weights.nbytes + num_layers * found.dense.layer_nbytes + found.dense.head_nbytes
    embedding = vocabulary * layer.hidden_size  # of which a token reads a row
    assert (nbytes / layer.itemsize + embedding) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_layers = 3", "num_layers = 100000", "num_layers=100000: must be at most"),
        ("hidden_size = 32\n", "", "lacks layer.hidden_size"),
        ("itemsize = 2", "itemsize = 2\n[dense]\nlayer_nbytes = -1\nhead_nbytes = 1", "dense.layer_nbytes=-1: must be"),
    ],
)
def test_errors_of_a_geometry_name_file_key_and_value(tmp_path: Path, old: str, new: str, message: str):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(HardwareError, match=message) as error:
        read_geometry(str(path))
    assert str(path) in str(error.value)
