"""Files of machines and models: what is shipped, what is refused and how, and that writing and reading are inverse."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly_lab.sim.geometries import read_geometry
from expertly_lab.sim.hardware import Hardware, Link, shipped

FULL = Hardware('a "machine" with a \\ and ünïcode 🦀', Link(math.inf, 7), 5e9, 1, 2, 3)


@pytest.mark.parametrize("name", shipped("hardware"))
def test_shipped_profiles_are_read_and_every_number_has_its_source_beside_it(name: str):
    hardware = Hardware.read(name)
    assert hardware.name == name
    text = (Path(__file__).parents[2] / "src" / "expertly_lab" / "data" / "hardware" / f"{name}.toml").read_text()
    lines = text.splitlines() if name != "infinite" else []
    for i, line in enumerate(lines):
        if re.match(r"\w+ = [\d.]", line):
            assert "#" in line or lines[i - 1].startswith("#"), line


def test_a_written_file_is_read_back(tmp_path: Path):
    path = tmp_path / "folder" / "machine.toml"
    FULL.write(path, ["made by\na test"])
    assert Hardware.read(str(path)) == FULL
    assert path.read_text().startswith("# made by a test\n")
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"machine.toml: cannot be written"):
        FULL.write(tmp_path / "file" / "machine.toml")


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (Hardware.read, r"hardware='mixtral': .*accepted: a100, .*rtx4090, or a TOML file"),
        (read_geometry, r"geometry='mixtral': .*accepted: .*gpt-oss-20b, .*or a TOML file"),
    ],
)
def test_an_unknown_name_lists_the_shipped_ones(read: Callable[[str], object], message: str):
    with pytest.raises(ConfigError, match=message):
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
        ("layer_ns = 1\n", "", "layer_ns: Field required; `expertly lab machine MODEL --out FILE.toml` writes"),
        ("layer_ns = 1", "layer_ns = -1", r"layer_ns=-1: must be greater than or equal to 0"),
        ("layer_ns = 1", "layer_ns = 1.5", r"layer_ns=1.5: must be a valid integer"),
        ("layer_ns = 1", "layer_ns = true", r"layer_ns=True: must be"),
        (
            "layer_ns = 1",
            "layer_ns = 1\nflops_per_s = 1e12",
            r"flops_per_s=.*: Unexpected keyword argument; .*lab machine MODEL --out",
        ),
        ("latency_ns = 7", "latency_ns = 7\noverhead_ns = 1", r"link.overhead_ns=1: Unexpected keyword"),
        ("nbytes_per_s = 5000000000.0", "nbytes_per_s = 0", r"expert_nbytes_per_s=0: must be greater than 0"),
        ("nbytes_per_s = 5000000000.0", "nbytes_per_s = nan", r"expert_nbytes_per_s=nan: must be"),
        ("name = ", "name = 3 #", "name=3: must be a valid string"),
        ("[link]", "[[link]]", r"link=\[\{.*must be an object"),
        ("name = ", "name : ", "not TOML"),
    ],
)
def test_errors_name_file_key_and_value(tmp_path: Path, old: str, new: str, message: str):
    path = written(tmp_path, (old, new))
    with pytest.raises(ConfigError, match=message) as error:
        Hardware.read(path)
    assert path in str(error.value)


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
        except ConfigError:
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


@pytest.mark.parametrize("name", shipped("geometry"))
def test_all_weights_together_are_the_published_number(name: str):
    result = read_geometry(name)
    billions, vocabulary, num_layers, num_experts, top_k = PUBLISHED[name]
    layer = result.layers[0]
    assert (result.name, len(result.layers), layer.num_experts, layer.top_k) == (name, num_layers, num_experts, top_k)
    assert result.dense is not None
    weights = Geometry(tuple(layer.unquantised() for layer in result.layers))
    nbytes = weights.nbytes + num_layers * result.dense.layer_nbytes + result.dense.head_nbytes
    embedding = vocabulary * layer.hidden_size  # of which a token reads a row
    assert (nbytes / layer.itemsize + embedding) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_layers = 3", "num_layers = 100000", "num_layers=100000: must be less than or equal to 10000"),
        ("hidden_size = 32\n", "", "layer.hidden_size: Field required"),
        ("itemsize = 2", "itemsize = 2\n[dense]\nlayer_nbytes = -1\nhead_nbytes = 1", "dense.layer_nbytes=-1: must be"),
    ],
)
def test_errors_of_a_geometry_name_file_key_and_value(tmp_path: Path, old: str, new: str, message: str):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=message) as error:
        read_geometry(str(path))
    assert str(path) in str(error.value)
