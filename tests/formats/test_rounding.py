"""`quantize`: weights become the nearest numbers of a format, and the model is the one of these weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import expertly
from expertly.cli.main import main
from expertly.formats import ROUNDED_TO, rounding_format
from expertly.model.needs import needs_of
from expertly.model.packing import pack
from expertly.store.packed import PackedStore
from tests.cli.asking import Captured, answer, refusal
from tests.engine.observe import loaded
from tests.families import FAMILIES, Family, generate, load_reference, logits_of, make_checkpoint, make_prompts
from tests.model.checkpoints import change, make_mxfp4_checkpoint


def of_mxfp4(parts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = (torch.from_numpy(part) for part in parts)
    weights = convert_moe_packed_tensors(codes[None], scales[None, :, :, 0], dtype=torch.float32)[0].T
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return weights, torch.cat((grid, -grid)) * 2.0 ** (scales.int() - 127)


def of_gguf(kind: GGMLQuantizationType, least: int) -> Callable[[Any], tuple[torch.Tensor, torch.Tensor]]:
    def decoded(parts: Any) -> tuple[torch.Tensor, torch.Tensor]:
        (blocks,) = parts
        weights = dequantize(blocks.reshape(len(blocks), -1), kind)
        scales = torch.from_numpy(blocks[..., :2].copy()).view(torch.float16).float()
        return torch.from_numpy(weights), torch.arange(least, -least) * scales

    return decoded


DECODED: dict[str, Callable[[Any], tuple[torch.Tensor, torch.Tensor]]] = {
    "mxfp4": of_mxfp4,
    "int4": of_gguf(GGMLQuantizationType.Q4_0, -8),
    "int8": of_gguf(GGMLQuantizationType.Q8_0, -128),
}
"""Weights [rows, columns] from their parts, decoded by others, and all that a group may have, [rows, groups, n]."""


def rounded(weights: torch.Tensor, form: str) -> torch.Tensor:
    """Of a matrix of float32 or bfloat16."""
    return DECODED[form](rounding_format(form).encode(weights.float()))[0]


@pytest.fixture(params=ROUNDED_TO)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


def test_weights_become_the_nearest_numbers(form: str) -> None:
    """Of their group's scale, by trying all; half and twice the scale are no better."""
    dice, rounding = torch.Generator().manual_seed(0), rounding_format(form)
    group = rounding.group
    usual = torch.randn(64, 8 * group, generator=dice) * 0.02
    spread = usual * 10.0 ** torch.randint(-2, 5, (64, 8, 1), generator=dice).expand(-1, -1, group).reshape(64, -1)
    ties = torch.arange(-4 * group, 4 * group).reshape(2, -1) / 64
    for weights in (usual, spread, ties, usual.bfloat16().float()):
        found, numbers = DECODED[form](rounding.encode(weights))
        groups, numbers = weights.reshape(-1, group, 1), numbers.reshape(-1, 1, numbers.shape[-1])
        away = (found.reshape(groups.shape) - groups).abs()
        assert torch.equal(away, (numbers - groups).abs().amin(dim=-1, keepdim=True))
        for factor in (0.5, 2):
            others = (numbers * factor - groups).abs().amin(dim=-1).square().sum(dim=1)
            assert bool((away.square().sum(dim=(1, 2)) <= others * 1.0001).all())
        assert away.square().sum() < 0.02 * groups.square().sum()
    extremes = torch.zeros(3, group)
    extremes[1, 0], extremes[2, 0] = 3e38, -1e-44
    found, _ = DECODED[form](rounding.encode(extremes))
    assert bool(found.isfinite().all()) and found[1, 0] > 1e4 and found[2].abs().max() < 1e-37


# -- whole models ------------------------------------------------------------------------------------------------------

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 128},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 64},  # interleaved, transposed and with biases
}


def sized(family: str, **changed: Any) -> Family:
    return replace(FAMILIES[family], config=FAMILIES[family].config | SIZES[family] | changed)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rounding")
    return {name: make_checkpoint(sized(name), folder / name, tokenizer=True) for name in SIZES}


def rounded_reference(source: Path, form: str) -> PreTrainedModel:
    """transformers' model, its experts' weights replaced."""
    model = load_reference(source)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith("_proj") and ".experts." in name:
                turned = weights.transpose(1, 2) if model.config.model_type == "gpt_oss" else weights
                found = torch.stack([rounded(matrix, form) for matrix in turned])
                weights.copy_(found.transpose(1, 2) if turned is not weights else found)
            elif ".experts.expert_" in name:
                weights.copy_(rounded(weights, form))
    return model


@pytest.mark.parametrize(
    ("form", "family"),
    [*(("mxfp4", family) for family in SIZES), *((form, "qwen3_moe") for form in ROUNDED_TO if form != "mxfp4")],
)
def test_a_rounded_model_is_that_of_the_nearest_numbers(form: str, family: str, sources: Any, tmp_path: Path) -> None:
    source = sources[family]
    store = pack(source, tmp_path / "store", quantize=form)
    original, rounded = load_reference(source), rounded_reference(source, form)
    prompts = make_prompts(2, length=14)
    tokens, logits = generate(rounded, prompts), logits_of(rounded, prompts)
    assert (tokens != generate(original, prompts)) == (form != "int8")
    for system, memory in (("lru", "25%"), ("expertly", "60%")):
        with loaded(store.folder, memory=memory, system=system) as model:
            assert generate(model, prompts) == tokens
            torch.testing.assert_close(logits_of(model, prompts), logits, rtol=1e-4, atol=1e-4)
            assert expertly.stats(model).as_dict()["rounding"] == {"to": form}
    assert PackedStore.open(store.folder).manifest == store.manifest


def test_commands_say_it(sources: Any, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody rounds by default."""
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path))
    source = sources["qwen3_moe"]
    assert main(["pack", str(source), "--quantize", "mxfp4"]) == 0
    said = capsys.readouterr()
    assert "612 KiB in mxfp4 rounded from the checkpoint's (4.50 MiB in float32)" in said.err
    (listed,) = answer(capsys, "pack", "--list")["stores"]
    assert (listed["dtype"], listed["rounded"]) == ("mxfp4", True)
    store = said.out.strip()
    asked = ["run", store, "One", "--raw", "--max-new-tokens", "2", "--memory", "50%", "--system", "lru"]
    assert main(asked) == 0
    line, budget = capsys.readouterr().err.splitlines()[-2:]
    assert "experts rounded to mxfp4" in line and "rounded to mxfp4" in budget
    assert answer(capsys, *asked)["rounding"] == asdict(needs_of(store))["rounding"] == {"to": "mxfp4"}
    with loaded(source, memory="50%") as model:
        assert expertly.stats(model).as_dict()["rounding"] is None


@pytest.mark.parametrize(
    ("model", "words", "message"),
    [
        ("tiny", "--quantize int3", "quantize='int3': not a format to round to; accepted: mxfp4, int4, int8"),
        ("tiny", "--quantize mxfp4 --dtype float32", "dtype='float32' and quantize='mxfp4': accepted: one of the two"),
        ("quantised", "--quantize mxfp4", "is quantised already ('mxfp4'); accepted: without quantize"),
        ("narrow", "--quantize mxfp4", "experts: intermediate_size=48: mxfp4 needs a multiple of 32"),
        ("store", "--quantize mxfp4", "quantize='mxfp4': the packed store store holds float32, not rounded"),
        (
            "nan",
            "--quantize mxfp4",
            "expert 2 of model.layers.1.mlp.experts holds NaN or infinity, for which mxfp4 has",
        ),
    ],
)
def test_what_cannot_be_rounded_is_refused(
    model: str, words: str, message: str, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def damage(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.endswith("layers.1.mlp.experts.2.down_proj.weight"):
            tensor[3, 5] = torch.nan
        return tensor

    if model == "quantised":
        make_mxfp4_checkpoint(tmp_path / model)
    else:
        make_checkpoint(
            sized("qwen3_moe", **({"moe_intermediate_size": 48} if model == "narrow" else {})), tmp_path / model
        )
    if model == "nan":
        change(tmp_path / model, damage)
    elif model == "store":
        Path(model).rename("source")
        pack("source", model)
    assert message in refusal(capsys, "pack", f"./{model}", *words.split())
    assert [one for one in answer(capsys, "pack", "--list")["stores"] if one["problem"] is None] == []
