"""The fields that --full adds, in every family, against the model's own weights and what its experts receive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from expertly.api import handle
from expertly.lab.recording import record
from expertly.model.hooks import experts_modules
from expertly.trace.reader import Trace
from tests.engine.conftest import Cases
from tests.engine.observe import loaded
from tests.families import FAMILIES, generate

SIGMOID = {"deepseek_v3", "glm4_moe", "dots1", "lfm2_moe"}
CHOICE_IS_NOT_TOP_K = SIGMOID | {"ernie4_5_moe"}  # a bias takes part in the choice
NUM_NEW = 3
MAX_DISTANCE = 8


def scores_by_hand(model: Any, layer: int, hidden: torch.Tensor, is_sigmoid: bool) -> torch.Tensor:
    """From the one weight [E, H] beside the experts of a layer, and its bias if it has one."""
    manifest = handle(model).store.manifest
    block = model.get_submodule(manifest.sites[layer].rpartition(".")[0])
    shape = (manifest.layers[layer].num_experts, hidden.shape[-1])
    (module,) = [
        module
        for name, module in block.named_modules()
        if not name.startswith("experts") and getattr(getattr(module, "weight", None), "shape", None) == shape
    ]
    logits = linear(hidden, module.weight, getattr(module, "bias", None))
    return logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True) if is_sigmoid else logits.softmax(-1)


def router_inputs_of(model: Any) -> tuple[list[dict[int, torch.Tensor]], list[Any]]:
    """A list that gets the experts' inputs [T, H] of each pass, by layer, and the hooks that fill it."""
    passes: list[dict[int, torch.Tensor]] = []
    handles = []
    for layer, module in enumerate(experts_modules(model)):

        def before(_: nn.Module, args: tuple[torch.Tensor, ...], layer: int = layer) -> None:
            if not passes or layer in passes[-1] or layer < max(passes[-1]):
                passes.append({})
            passes[-1][layer] = args[0].clone()

        handles.append(module.register_forward_pre_hook(before))
    return passes, handles


@pytest.mark.parametrize("family", FAMILIES)
def test_full_fields_are_the_models_own(family: str, cases: Cases, tmp_path: Path) -> None:
    case, is_sigmoid = cases[family], family in SIGMOID
    prompt = case.prompts[0]
    with loaded(case.store) as model:
        with record(model, tmp_path / "trace", full=True) as recorder:
            assert recorder.absent == {}
            passes, handles = router_inputs_of(model)
            recorder.begin_request()
            (tokens,) = generate(model, [prompt], NUM_NEW)
            for one in handles:
                one.remove()
        assert tokens == case.tokens[0][: len(tokens)]
        trace = Trace.open(tmp_path / "trace")
        field = {name: trace.rows(name, 0, trace.num_rows) for name in trace.manifest.fields}
        embedded = model.get_input_embeddings()(torch.from_numpy(field["token"].astype(np.int64)))
        assert np.array_equal(field["embedding"], embedded.half().numpy())
        layers, first = handle(model).store.manifest.layers, 0
        if family == "switch_transformers":  # the encoder's pass is one of its own
            passes = [{0: passes[0][0], 1: passes[0][1]}, {2: passes[0][2], 3: passes[0][3]}, *passes[1:]]
        assert len(passes) == trace.num_iterations
        for seen in passes:
            num_rows = len(next(iter(seen.values())))
            rows = slice(first, first + num_rows)
            for layer in range(len(layers)):
                inputs = seen.get(layer)
                if inputs is None:
                    for name in ("probs", "router_inputs", "lookahead"):
                        assert not field[name][rows, layer].any(), "it did not run"
                    continue
                assert np.array_equal(field["router_inputs"][rows, layer], inputs.half().numpy())
                for distance in range(MAX_DISTANCE + 1):
                    name = f"layer {layer}, distance {distance}"
                    found = field["lookahead"][rows, layer, distance - 1] if distance else field["probs"][rows, layer]
                    ahead = layer + distance
                    if ahead not in seen and distance < len(seen) and len(layers) - 1 in seen:
                        ahead -= len(seen)  # of the next token; an encoder has none
                    if ahead not in seen:
                        assert not found.any(), name
                        continue
                    by_hand = scores_by_hand(model, ahead, inputs, is_sigmoid)
                    np.testing.assert_allclose(found, by_hand.numpy(), rtol=2e-3, atol=1e-3, err_msg=name)
                    np.testing.assert_allclose(found.astype(np.float32).sum(-1), 1, atol=5e-3, err_msg=name)
            first += num_rows
        assert first == trace.num_rows
        if family not in CHOICE_IS_NOT_TOP_K and family != "switch_transformers":
            top_k = layers[0].top_k
            chosen = np.take_along_axis(field["probs"], field["experts"].astype(np.int64), -1)
            assert (chosen.min(-1) >= -np.sort(-field["probs"])[..., top_k - 1]).all(), "the top K were chosen"


def test_what_a_model_does_not_have_is_named_and_left_out(cases: Cases, tmp_path: Path) -> None:
    prompt = cases["mixtral"].prompts[0]
    with loaded(cases["mixtral"].store) as model:
        gate = model.model.layers[1].mlp.gate
        original = type(gate)

        class Stateful(original):  # type: ignore[misc, valid-type]
            num_rows = 0

            def forward(self, hidden_states: torch.Tensor) -> Any:
                if len(hidden_states) == 3:
                    raise ValueError("not without what ran before")
                return super().forward(hidden_states)

        gate.__class__ = Stateful
        with record(model, tmp_path / "deaf", full=True) as recorder:
            assert list(recorder.absent) == ["lookahead"] and "layers 1 need" in recorder.absent["lookahead"]
            recorder.begin_request()
            generate(model, [prompt], NUM_NEW)
        gate.__class__ = original
        block = model.model.layers[1].mlp
        del block.gate
        block.__dict__["gate"] = gate.forward
        with record(model, tmp_path / "hidden", full=True) as recorder:
            assert list(recorder.absent) == ["probs", "router_inputs", "lookahead"]
            recorder.begin_request()
            generate(model, [prompt], NUM_NEW)
    deaf, hidden = Trace.open(tmp_path / "deaf"), Trace.open(tmp_path / "hidden")
    assert {"probs", "router_inputs", "embedding"} <= deaf.manifest.fields.keys()
    assert not deaf.has("lookahead") and "no lookahead: " in deaf.manifest.fields["experts"].note
    assert hidden.has("embedding") and not hidden.has("probs")
    assert hidden.manifest.scoring == "unknown" and "no probs: " in hidden.manifest.fields["experts"].note
    assert deaf.num_rows == hidden.num_rows == len(prompt) + NUM_NEW - 1
