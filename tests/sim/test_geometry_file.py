"""Geometry files: the shipped ones add up to the published sizes; what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertly.core.errors import HardwareError
from expertly.core.geometry import Geometry
from expertly.sim.hardware import GEOMETRY_NAMES, read_geometry

PUBLISHED = {  # billions of parameters in all, vocabulary, layers, experts, top-k
    "gpt-oss-20b": (20.9, 201088, 24, 32, 4),
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


def test_names_are_the_shipped_files():
    folder = Path(__file__).parents[2] / "src" / "expertly" / "data" / "geometry"
    assert sorted(GEOMETRY_NAMES) == sorted(path.stem for path in folder.glob("*.toml")) == sorted(PUBLISHED)


@pytest.mark.parametrize("name", GEOMETRY_NAMES)
def test_all_weights_together_are_the_published_number(name: str):
    found = read_geometry(name)
    billions, vocabulary, num_layers, num_experts, top_k = PUBLISHED[name]
    layer = found.layers[0]
    assert (found.name, len(found.layers), layer.num_experts, layer.top_k) == (name, num_layers, num_experts, top_k)
    assert found.dense is not None
    nbytes = Geometry(found.layers).nbytes + num_layers * found.dense.layer_nbytes + found.dense.head_nbytes
    embedding = vocabulary * layer.hidden_size  # of which a token reads a row
    assert (nbytes / layer.itemsize + embedding) / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_file_of_ones_own(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    found = read_geometry(str(path))
    assert len(found.layers) == 3 and found.layers[0].expert_nbytes == 16 * 3 * 32 * 2
    assert found.dense is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_layers = 3", "num_layers = 0", "num_layers=0: must be a whole number from 1"),
        ("num_layers = 3", "num_layers = 100000", "num_layers=100000: must be at most"),
        ("itemsize = 2", "itemsize = 0.53", "layer.itemsize=0.53: must be a whole number from 1"),
        (
            "itemsize = 2",
            "itemsize = 2\nbits_per_weight = 4",
            "layer.bits_per_weight=4: unknown key; accepted: num",
        ),
        ("top_k = 2", "top_k = 9", "top_k=9: more than the 8 experts"),
        ("hidden_size = 32\n", "", "lacks layer.hidden_size"),
        ("itemsize = 2", "itemsize = 2\n[dense]\nlayer_nbytes = 1", "lacks dense.head_nbytes"),
        ("itemsize = 2", "itemsize = 2\n[dense]\nlayer_nbytes = -1\nhead_nbytes = 1", "dense.layer_nbytes=-1: must be"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, message: str):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(HardwareError, match=message) as error:
        read_geometry(str(path))
    assert str(path) in str(error.value)


def test_an_unknown_name_lists_the_shipped_ones():
    with pytest.raises(HardwareError, match=r"geometry='mixtral': .*accepted: gpt-oss-20b, .*or a TOML file"):
        read_geometry("mixtral")
