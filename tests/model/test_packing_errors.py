"""Bad checkpoints are refused by name, and leave nothing behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from expertly.core.errors import CheckpointError, ConfigError
from expertly.model.packing import default_dtype, pack
from expertly.store.checkpoint import Checkpoint
from tests.families import NUM_EXPERTS, make_checkpoint
from tests.model.checkpoints import (
    assert_holds_what_transformers_loads,
    change,
    make_fused_checkpoint,
    read_tensors,
    refused,
    set_config,
    write_checkpoint,
)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints to be copied and spoiled, by how they hold their experts."""
    folder = tmp_path_factory.mktemp("layouts")
    return {
        "per expert": make_checkpoint("qwen3_moe", folder / "qwen3_moe"),
        "fused": make_fused_checkpoint("qwen3_moe", folder / "fused"),
        "modules": make_checkpoint("switch_transformers", folder / "switch"),
    }


@pytest.fixture(autouse=True)
def nothing_is_begun(tmp_path: Path) -> Iterator[None]:
    """All of this is found before anything is written."""
    yield
    assert not list(tmp_path.glob("*.partial"))


@pytest.fixture
def source(tmp_path: Path, layouts: dict[str, Path]) -> Path:
    return Path(shutil.copytree(layouts["per expert"], tmp_path / "source"))


@pytest.mark.parametrize("value", ["NaN", "int8", "float64", 3])
def test_a_config_dtype_that_is_none_is_named(source: Path, value: Any) -> None:
    set_config(source, dtype=value)
    refused(source, CheckpointError, rf"config\.json: dtype='{value}': .*accepted: bfloat16, float16, float32")
    with pytest.raises(ConfigError, match="dtype='NaN'"):
        pack(source, source.with_name("refused"), "NaN")


def test_the_dtype_is_the_config_s_or_that_of_most_bytes(tmp_path: Path) -> None:
    source = make_checkpoint("qwen3_moe", tmp_path / "source", dtype=torch.bfloat16)
    assert default_dtype(Checkpoint.open(source)) == "bfloat16"
    for fields, expected in (
        ({"dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": None, "torch_dtype": None}, "bfloat16"),
        ({"torch_dtype": None, "text_config": {"dtype": "float16"}}, "float16"),
    ):
        set_config(source, **fields)
        assert default_dtype(Checkpoint.open(source)) == expected


LAYOUTS = ("per expert", "fused", "modules")


@pytest.mark.parametrize("num_experts", [NUM_EXPERTS - 1, NUM_EXPERTS + 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_expert_count_that_disagrees_is_named(
    tmp_path: Path, layouts: dict[str, Path], layout: str, num_experts: int
) -> None:
    source = Path(shutil.copytree(layouts[layout], tmp_path / "source"))

    def cut_router(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_router = name.endswith(("gate.weight", "classifier.weight"))
        return tensor[:1].expand(num_experts, -1) if is_router else tensor

    change(source, cut_router)
    is_named = "num_local_experts" in (source / "config.json").read_text()
    set_config(source, **{"num_local_experts" if is_named else "num_experts": num_experts})
    refused(source, CheckpointError, rf"config\.json says {num_experts}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_of_another_shape_than_the_config_s_are_named(
    tmp_path: Path, layouts: dict[str, Path], layout: str
) -> None:
    source = Path(shutil.copytree(layouts[layout], tmp_path / "source"))
    set_config(source, **({"d_ff": 24} if layout == "modules" else {"moe_intermediate_size": 24}))
    refused(source, CheckpointError, r"tensor '.*expert.*' \(\[.*\]\): makes .* of shape .* but config\.json says")


Change = Callable[[torch.Tensor], torch.Tensor | None]


@pytest.mark.parametrize(
    ("part", "changed", "message"),
    [
        ("layers.1.mlp.experts.3.", lambda one: None, r"layers\.1\.mlp\.experts: .* has 7 experts, but .* says 8"),
        ("layers.2.mlp.experts", lambda one: None, r"no tensor for model\.layers\.2\.mlp\.experts\.gate_up_proj"),
        ("layers.0.mlp.experts.5.up_proj", lambda one: one[:-1], r"experts\.5\.up_proj\.weight.*\[15, 32\] is unlike"),
        (".up_proj", lambda one: one[:, :-1], r"cannot be made into model\.layers\.0\.mlp\.experts\.gate_up_proj"),
        ("lm_head.weight", lambda one: one[:-1], r"'lm_head\.weight': .*\[127, 32\].* config\.json .*\[128, 32\]"),
        ("model.norm.weight", lambda one: None, r"no tensor for model\.norm\.weight"),
        ("experts", lambda one: one.to(torch.int8), r"experts\.0\.gate_proj\.weight': dtype='I8': .* must be BF16"),
        ("experts", lambda one: one.to(torch.float8_e4m3fn), r"gate_proj\.weight': dtype='F8_E4M3': .* must be BF16"),
    ],
)
def test_a_tensor_that_is_not_as_it_should_be_is_named(source: Path, part: str, changed: Change, message: str) -> None:
    change(source, lambda name, tensor: changed(tensor) if part in name else tensor)
    refused(source, CheckpointError, message)


def test_a_misnumbered_expert_is_named(source: Path) -> None:
    tensors = {name.replace("experts.3.", "experts.11."): tensor for name, tensor in read_tensors(source).items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    refused(source, CheckpointError, "expert 3 is not in the checkpoint")


def test_tensors_that_transformers_ignores_are_left_out(source: Path, tmp_path: Path) -> None:
    tensors = read_tensors(source) | {"model.layers.9.mlp.experts.0.up_proj.weight": torch.ones(16, 32)}
    extended = write_checkpoint(tmp_path / "extended", tensors, source)
    store = pack(extended, tmp_path / "store")
    assert not [name for name in store.dense if "layers.9" in name]
    assert_holds_what_transformers_loads(store, extended)
