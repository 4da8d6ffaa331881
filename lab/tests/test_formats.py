"""Experts in native formats, as the lab measures and describes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertly.formats import check_format
from expertly_lab.model_profile import measure_model
from expertly_lab.sim.geometries import read_geometry
from expertly_lab.sim.hardware import Hardware
from tests.formats.test_formats import loaded, make_mxfp4_checkpoint, pack


@pytest.mark.parametrize("num_blocks", [1, 6])
def test_a_model_whose_blocks_do_not_make_four_parts_is_measured(num_blocks: int, tmp_path: Path) -> None:
    """As those of gpt-oss do not, though its neurons do."""
    pack(make_mxfp4_checkpoint(tmp_path / "source", intermediate=32 * num_blocks), tmp_path / "store")
    with loaded(tmp_path / "store", memory="60%", system="lru") as model:
        measured_on = measure_model(model, seconds=0.2)
    measured_on.write(tmp_path / "here.toml")
    assert Hardware.read(str(tmp_path / "here.toml")) == measured_on


@pytest.mark.parametrize("name", ["gpt-oss-20b-mxfp4", "qwen3-30b-a3b-fp8", "qwen3-30b-a3b-int4", "deepseek-v3-fp8"])
def test_the_shipped_geometry_is_the_formats(name: str) -> None:
    for layer in read_geometry(name).layers:
        check_format(layer)
        assert layer.format.startswith(name.rpartition("-")[2])
