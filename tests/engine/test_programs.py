"""Decoder layers as programs of the compiled library: what a user sees is the same, whatever ran natively."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeModel,
    Qwen3MoeRMSNorm,
    Qwen3MoeSparseMoeBlock,
)

import expertly
from expertly.api import handle
from expertly.model import graphs, programs
from expertly.model.hooks import CACHE, experts_modules
from expertly.model.playing import forward
from expertly.model.routers import HookedRouter
from expertly.native import kernels as native_kernels
from expertly.policies.prediction import best_of_rows
from tests.engine.conftest import Cases
from tests.engine.observe import loaded
from tests.engine.test_graphs import RECORDED
from tests.families import FAMILIES, Family, generate, load_reference, make_checkpoint, make_prompts
from tests.formats.gguf_files import make_gguf
from tests.formats.references import decoded
from tests.golden.engine import make_transfers_instant
from tests.model.test_turns import Passes

pytestmark = pytest.mark.timeout(180)

COMPARED = 3
"""Tokens that a layer computes both ways before it is a program."""


def programs_of(model: Any) -> list[graphs.Forms]:
    return [it.__dict__["_expertly_graphs"] for it in model.modules() if it.__dict__.get("_expertly_graphs")]


def num_run(model: Any) -> int:
    number = expertly.stats(model).as_dict()["kernels"]["programs"]
    assert isinstance(number, int)
    return number


@contextmanager
def without_programs(store: Path, **options: Any) -> Iterator[Any]:
    with loaded(store, **options) as model:
        for module in model.modules():
            if "_expertly_graphs" in module.__dict__:
                module._expertly_graphs = None
        yield model


@pytest.mark.parametrize("family", sorted(RECORDED))
def test_in_bfloat16_a_layer_gives_the_same_bits(family: str, tmp_path: Path) -> None:
    """As the layer's own forward, over more tokens than those that were compared; test_every_family.py has float32."""
    folder = make_checkpoint(family, tmp_path / "checkpoint", dtype=torch.bfloat16)
    prompt, tokens = make_prompts(1)[0], make_prompts(1, length=12, seed=3)[0]
    logits = []
    for opened in (loaded, without_programs):
        with opened(folder, system="lru", memory="60%") as model:
            logits.append(decoded(model, prompt, tokens))
            num_layers = len(programs_of(model))
            assert bool(num_layers) == (opened is loaded)
            assert num_run(model) == num_layers * (len(tokens) - COMPARED)
    assert torch.equal(*logits)


@pytest.mark.parametrize("kind", ["Q4_K", "BF16"])
def test_a_token_of_a_quantised_file_is_one_native_call(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Projections of blocks, norms, rotation, attention, router and experts of all layers, with the same bits."""
    path = make_gguf(tmp_path / "model.gguf", "Q8_0", dense=kind)
    run, counts, logits = native_kernels.Kernels.run_program, list[int](), []
    monkeypatch.setattr(native_kernels.Kernels, "run_program", lambda *call: (counts.append(1), run(*call))[1])
    prompt, tokens = make_prompts(1)[0], make_prompts(1, length=12, seed=3)[0]
    for opened in (loaded, without_programs):
        with opened(path, system="resident", memory="100%") as model:
            logits.append(decoded(model, prompt, tokens))
            counts.clear()
            assert torch.equal(decoded(model, prompt, tokens), logits[0])
            num_layers = len(programs_of(model))
            assert len(counts) == (num_layers + len(tokens) if num_layers else 0), "once a layer for a new cache"
    assert torch.equal(*logits)


@pytest.mark.parametrize("options", [
    {"system": "lru"}, {"system": "lfu"}, {"system": "lru:scope=global"}, {"system": "expertly"}, {"system": "lcp"},
    {"system": "on-demand"}, {"system": "lru", "segments": 4}, {"system": "resident", "memory": "100%"},
], ids=lambda options: "-".join(map(str, options.values())))  # fmt: skip
def test_decisions_are_those_of_a_scheduler_that_is_asked_at_once(options: dict[str, Any], cases: Cases) -> None:
    """What layers chose that ran by themselves is told before the next decision: hits, loads, evictions and what is
    resident at the end are the same.
    """
    case, seen = cases["qwen3_moe"], []
    for opened in (loaded, without_programs):
        with opened(case.store, **{"memory": "60%", **options}) as model:
            for prompt in (*case.prompts, *case.prompts):
                generate(model, [prompt], 9)
            seen.append(decided(model))
            assert (num_run(model) > 0) == (opened is loaded)
    assert seen[0] == seen[1]


def decided(model: Any) -> tuple[list[dict[str, Any]], list[int]]:
    """All counts but times, by layer and phase, and the state of every unit."""
    layers = expertly.stats(model).as_dict()["layers"]
    phases = [phase for layer in layers for phase in (layer["prefill"], layer["decode"])]
    counts = [{name: number for name, number in phase.items() if not name.endswith("_s")} for phase in phases]
    return counts, list(handle(model).engine.scheduler.cache.state)


@pytest.mark.parametrize("memory", ["60%", "90%"])
@pytest.mark.parametrize(
    "system",
    [
        "expertly-ahead",
        "lru:prediction=lookahead",
        "lru:prediction=lookahead:ahead=staging:width=2",
        "lfu:prediction=lookahead:width=1",
        "fmoe:prediction=lookahead:distance=1",
    ],
)
def test_what_the_next_router_says_is_told_as_if_each_layer_had_asked(system: str, memory: str, cases: Cases) -> None:
    """A layer runs by itself if its experts and all that it predicts are resident; who predicts is told before the next
    decision: predictions, prefetches, hits and what is resident at the end are the same, and so are the tokens.
    """
    case, seen, asked = cases["qwen3_moe"], [], list[int]()
    for opened in (loaded, without_programs):
        with opened(case.store, system=system, memory=memory, segments=1) as model:
            make_transfers_instant(model)
            engine: Any = handle(model).engine
            run, num_asked = engine.forward_experts, list[int]()
            for module in experts_modules(model):
                module._expertly_runtime = engine
            engine.forward_experts = lambda *call, run=run, num=num_asked: (num.append(1), run(*call))[1]
            tokens = [generate(model, [prompt], 24) for prompt in (*case.prompts, *case.prompts)]
            for num_at_once in (1, 2, 1, 3, 1):  # each has a program of its own
                with torch.no_grad():
                    logits, cache = forward(model, torch.tensor([case.prompts[0]]), None)
                    for ids in torch.tensor([tokens[0][0]]).split(num_at_once, dim=1):
                        logits, cache = forward(model, ids, cache)
                tokens.append([logits[0, -1].argmax().item()])
                gc.collect()
            seen.append((tokens, decided(model)))
            asked.append(len(num_asked))
            decode = [layer["decode"] for layer in expertly.stats(model).as_dict()["layers"]]
            assert sum(phase["predicted"] for phase in decode[1:]) == sum(phase["predicted"] for phase in decode) > 0
            assert sum(phase["prefetched"] for phase in decode) > 0
    assert seen[0] == seen[1]
    assert asked[0] < asked[1] if memory == "90%" else asked[0] <= asked[1], "layers ran by themselves"


@pytest.mark.parametrize("width", [1, 2, 5])
def test_experts_run_only_if_all_that_will_be_named_are_resident(width: int, cases: Cases) -> None:
    """Named by scores in float16, of equal ones the lowest ids, none whose score is 0, as `best_of_rows` does."""
    dice = random.Random(width)
    with loaded(cases["qwen3_moe"].store, system=f"lru:prediction=lookahead:width={width}", memory="100%") as model:
        generate(model, [cases["qwen3_moe"].prompts[0]], 12)
        engine = handle(model).engine
        forms = [form for forms in programs_of(model) for form in forms._of_kind.values()]
        program = next(form for form in forms if getattr(form, "_looks_ahead", False) and form._layer == 0)
        scores, table, geometry = program._ran[-1], engine.scheduler.cache.first_slot, engine.executor.geometry
        following, num = geometry.first_ids[1], geometry.layers[1].num_experts
        slots, ran = list(table[following : following + num]), Counter[bool]()
        program._steps[program._at_experts * 16 + 1] = 1
        for _ in range(300):
            values = [0.0, 1e-9, 0.25, 0.25 + 1e-5, 0.2500001, 0.5, dice.random(), dice.random() / 1000]
            scores[0] = [dice.choice(values) for _ in range(num)]
            absent = set(dice.sample(range(num), dice.randint(0, 2)))
            for expert in range(num):
                table[following + expert] = -1 if expert in absent else 0
            named = best_of_rows(1, 1, scores.astype(np.float16).astype(np.float32), width)
            step, _ = engine.shard.kernels.run_program(program._steps, program._at_experts)
            has_run = step != program._at_experts
            assert has_run == (named is None or not absent & set(named.experts)), (scores, absent)
            ran[has_run] += 1
        scores[0, 0] = np.nan
        assert engine.shard.kernels.run_program(program._steps, program._at_experts)[0] == program._at_experts
        table[following : following + num] = array("q", slots)
    assert min(ran.values()) > 20


@pytest.mark.parametrize("system", ["expertly-ahead", "fmoe", "promoe:prediction=stride", "moepic", "moe-infinity"])
def test_who_predicts_is_asked_in_every_layer(system: str, cases: Cases) -> None:
    """The dense part runs as a program all the same."""
    case = cases["qwen3_moe"]
    with loaded(case.store, system=system, memory="60%") as model:
        for prompt, tokens in zip(case.prompts, case.tokens, strict=True):
            assert generate(model, [prompt]) == [tokens]
        stats = expertly.stats(model).as_dict()
        assert num_run(model) > 0 and stats["kernels"]["early"] == 0
        assert sum(layer["decode"]["predicted"] for layer in stats["layers"]) > 0


def test_a_cache_that_grows_is_cropped_or_copied(cases: Cases) -> None:
    """Room ends every 64 tokens; what is appended behind a crop or in a copy is not seen by the other."""
    case = cases["mixtral"]
    prompt, tokens = case.prompts[0], make_prompts(1, length=60, seed=5)[0]
    with loaded(case.store, memory="60%") as model:
        expected = decoded(case.reference, prompt, tokens)
        torch.testing.assert_close(
            decoded(model, prompt, tokens), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())
        )
        with torch.no_grad():
            cache = model(torch.tensor([prompt]), use_cache=True).past_key_values

            def step(token: int, cache: Any) -> torch.Tensor:
                return model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1]  # type: ignore[no-any-return]

            step(tokens[0], cache)
            twin = copy.deepcopy(cache)
            other, same = step(tokens[7], twin), step(tokens[1], cache)
            torch.testing.assert_close(same, expected[1], rtol=1e-3, atol=1e-3)
            assert not torch.allclose(other, same)
            cache.crop(-1)
            torch.testing.assert_close(step(tokens[1], cache), expected[1], rtol=1e-3, atol=1e-3)


def test_a_router_that_cannot_tell_is_torchs(cases: Cases) -> None:
    """Experts whose scores are nearer than another exp may put them: the program goes on behind torch's choice."""
    case = cases["qwen3_moe"]
    prompt, tokens = case.prompts[0], case.tokens[0]
    with loaded(case.store, memory="100%") as model, without_programs(case.store, memory="100%") as plain:
        decoded(model, prompt, tokens)
        for changed in (model, plain):
            for layer in changed.model.layers:
                weight = layer.mlp.gate.weight.data
                weight[1::2] = weight[::2] * (1 + 2e-7)
        before = num_run(model)
        assert torch.equal(decoded(model, prompt, tokens), decoded(plain, prompt, tokens))
        assert num_run(model) > before


def test_changes_and_hooks_are_heeded(cases: Cases) -> None:
    case, calls = cases["qwen3_moe"], []
    with loaded(case.store) as model, without_programs(case.store) as plain:
        prompt = case.prompts[:1]
        generate(model, prompt)

        def num_same() -> int:
            before = num_run(model)
            assert generate(model, prompt, 5) == generate(plain, prompt, 5)
            return (num_run(model) - before) // 4

        assert num_same() == 3
        hook = model.model.layers[1].post_attention_layernorm.register_forward_hook(lambda *_: calls.append(1))
        assert num_same() == 2 and len(calls) == 5
        hook.remove()
        assert num_same() == 3
        calls.clear()
        hook = model.model.layers[1].mlp.experts.register_forward_pre_hook(lambda *_: calls.append(1))
        assert num_same() == 2 and len(calls) == 5, "of the experts, too"
        hook.remove()
        usual = Qwen3MoeRMSNorm.forward
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Qwen3MoeRMSNorm, "forward", lambda self, hidden_states: usual(self, hidden_states) * 2)
            assert num_same() == 0, "a class's forward"
        with register_module_forward_hook(lambda *_: None):
            assert num_same() == 0, "of every module"
        blocks = [changed.model.layers[1].mlp for changed in (model, plain)]
        for block in blocks:
            block.forward = lambda hidden, usual=block.forward: usual(hidden) * 2
        assert num_same() == 2, "one module's forward"
        for block in blocks:
            del block.forward
        norm = model.model.layers[1].input_layernorm
        before = vars(norm)
        object.__setattr__(norm, "__dict__", before | {"forward": norm.forward})
        assert num_same() == 2, "all that a module has"
        object.__setattr__(norm, "__dict__", before)
        model.model.layers[1].input_layernorm = copy.deepcopy(norm)
        assert num_same() == 2, "another module"
        model.model.layers[1].input_layernorm = norm
        assert num_same() == 3
        for changed in (model, plain):
            changed.model.layers[1].input_layernorm.variance_epsilon = 10.0
        assert num_same() == 2, "a constant was noted"
        for changed in (model, plain):
            changed.model.layers[2].mlp.gate.weight.data.neg_()
        assert num_same() == 2, "a weight is read where it is"
        for changed in (model, plain):
            attention = changed.model.layers[0].self_attn
            attention.o_proj.weight = torch.nn.Parameter(-attention.o_proj.weight.detach(), requires_grad=False)
        assert num_same() == 1
        for changed in (model, plain):
            changed.set_attn_implementation("eager")
        assert num_same() >= 0, "attention is transformers'"


def test_a_token_of_resident_experts_is_one_call(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of a stack run on until there is something to decide. A hook on one has each called by itself."""
    case = cases["qwen3_moe"]
    with loaded(case.store, system="resident", memory="100%") as model:
        kernels, calls, (prompt, tokens) = handle(model).engine.shard.kernels, [], (case.prompts[0], case.tokens[0])
        decoded(model, prompt, tokens)
        run = kernels.run_program

        def counted(steps: Any, begin: int, most: int) -> tuple[int, int]:
            if begin == 0:  # not behind a router that cannot tell
                calls.append(most)
            return run(steps, begin, most)

        monkeypatch.setattr(kernels, "run_program", counted)
        expected = decoded(model, prompt, tokens)
        calls.clear()
        assert torch.equal(decoded(model, prompt, tokens), expected)
        assert len(calls) == len(tokens)
        layers = model.model.layers
        assert all(isinstance(layer, torch.nn.Module) for layer in layers), "whoever else asks gets the layers"
        assert layers[:] is not layers and list(layers[:]) == list(layers)
        seen: list[torch.Tensor] = []
        hook = layers[1].register_forward_hook(lambda layer, inputs, out: seen.append(inputs[0]))
        calls.clear()
        assert torch.equal(decoded(model, prompt, tokens), expected)
        assert len(calls) == 3 * len(tokens) and len(seen) == 1 + len(tokens)
        hook.remove()
        calls.clear()
        decoded(model, prompt, tokens)
        assert len(calls) == len(tokens)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # half of whose layers slide
def test_requests_that_share_a_pass_run_as_programs(family: str, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a server's paged cache, with up to four tokens: the tokens are those of `generate`. Pages of layers that do
    not slide are read where they lie: nothing copies them, and a text alone goes on in them, its attention looked at
    once (by torch's fused attention, which gpt-oss has not).
    """
    case, asked, copied = cases[family], {1: 12, 2: 20, 3: 25, 4: 30, 6: 12}, set()
    update = PagedAttentionCache.update

    def counted(self: Any, key: torch.Tensor, value: torch.Tensor, layer: int, *others: Any, **named: Any) -> Any:
        if key.shape[2] <= 4:
            copied.add(layer)
        return update(self, key, value, layer, *others, **named)

    placed = list[int]()
    place = programs.LayerProgram._place

    def noted(self: Any, kwargs: dict[str, Any]) -> bool:
        placed.append(self._layer)
        return place(self, kwargs)

    monkeypatch.setattr(programs.LayerProgram, "_place", noted)
    monkeypatch.setattr(PagedAttentionCache, "update", counted)
    prompts = make_prompts(max(asked), length=20, seed=7)
    with loaded(case.store, memory="60%") as model:
        batch = Passes(model, num_pages=64)
        try:
            for num_requests, length in asked.items():
                kernels = handle(model).engine.shard.kernels
                before, num_attended = num_run(model), kernels.counts.attention
                for number, prompt in enumerate(prompts[:num_requests]):
                    batch.ask(f"{num_requests}-{number}", prompt, length)
                batch.wait()
                if CACHE == "cache":  # pages are others before transformers 5.24
                    assert num_requests > 1 or family == "gpt_oss" or min(map(placed.count, placed)) == 1
                    assert num_run(model) > before or num_requests > 4
                    assert kernels.counts.attention > num_attended
        finally:
            batch.close()
        if CACHE == "cache":
            kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
            assert {kinds[layer] for layer in copied} <= {"sliding_attention"}
        for name, tokens in batch.tokens.items():
            assert tokens == generate(case.reference, [prompts[int(name[2:])]], len(tokens))[0]


def test_whoever_looks_between_layers_sees_what_they_give(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that change it, hidden states that are asked for, another forward of the stack."""
    case = cases["qwen3_moe"]
    prompt, tokens = case.prompts[0], case.tokens[0]
    with loaded(case.store) as model, without_programs(case.store) as plain:
        both = model, plain
        decoded(model, prompt, tokens)

        def agree() -> bool:
            return torch.equal(*(decoded(it, prompt, tokens) for it in both))

        assert agree()
        hooks = [it.model.layers[1].register_forward_hook(lambda layer, inputs, out: out * 1.5) for it in both]
        assert agree()
        for hook in hooks:
            hook.remove()
        states = []
        for it in both:
            with torch.no_grad():
                cache = it(torch.tensor([prompt]), use_cache=True).past_key_values
                token = torch.tensor([tokens[:1]])
                asked = it(token, past_key_values=cache, output_hidden_states=True)
                states.append(asked.hidden_states)
        assert len(states[0]) == 4 and all(map(torch.equal, *states))
        before = num_run(model)
        assert agree() and num_run(model) > before, "hooks that transformers leaves on layers stop nothing"
        seen = []

        def forward(self: Any, input_ids: torch.Tensor, past_key_values: Any = None, **kwargs: Any) -> Any:
            seen.extend(map(type, self.layers[: len(self.layers)]))
            return original(self, input_ids=input_ids, past_key_values=past_key_values, **kwargs)

        original = Qwen3MoeModel.forward
        monkeypatch.setattr(Qwen3MoeModel, "forward", forward)
        assert agree()
        assert all(issubclass(kind, torch.nn.Module) for kind in seen) and seen


def test_layers_run_as_they_are_ordered(cases: Cases) -> None:
    """Another order and the first one again; a layer that is there twice."""
    case = cases["qwen3_moe"]
    prompt, tokens = case.prompts[0], case.tokens[0]
    with loaded(case.store, memory="100%") as model, without_programs(case.store, memory="100%") as plain:
        stacks = [(it.model.layers, list(it.model.layers)) for it in (model, plain)]
        for order in ((0, 1, 2), (1, 0, 2), (0, 1, 2), (0, 1, 0), (0, 2, 2), (0, 1, 2)):
            for layers, as_loaded in stacks:
                for place, number in enumerate(order):
                    layers[place] = as_loaded[number]
            assert torch.equal(*(decoded(it, prompt, tokens) for it in (model, plain))), order


def test_each_layer_has_its_own_angles(tmp_path: Path) -> None:
    """Where layers that slide rotate otherwise than the rest."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    more = {"layer_types": kinds, "sliding_window": 64, "moe_intermediate_size": 16, "num_experts": 8, "head_dim": 8}
    folder = make_checkpoint(Family("mellum", 3, 2, {"intermediate_size": 48, **more}), tmp_path / "checkpoint")
    prompt, tokens = make_prompts(1)[0], make_prompts(1, length=12, seed=3)[0]
    with loaded(folder, memory="100%") as model:
        torch.testing.assert_close(decoded(model, prompt, tokens), decoded(load_reference(folder), prompt, tokens))
        assert num_run(model) > 0


def test_a_matrix_that_is_turned_where_it_is(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "checkpoint")
    prompt, tokens = make_prompts(1)[0], make_prompts(1, length=9, seed=3)[0]
    reference = load_reference(folder)
    with loaded(folder) as model:
        decoded(model, prompt, tokens)
        for it in (model, reference):
            weight = it.model.layers[1].self_attn.o_proj.weight  # as high as wide
            weight.data = weight.data.t()
        expected = decoded(reference, prompt, tokens)
        torch.testing.assert_close(decoded(model, prompt, tokens), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "name", ["granitemoe: residual_multiplier", "olmoe: self_attn.scaling", "mixtral: mlp.gate.top_k"]
)
def test_a_number_that_is_set_later_counts(name: str, cases: Cases) -> None:
    family, _, path = name.partition(": ")
    case = cases[family]
    prompt, tokens = case.prompts[0], case.tokens[0]
    with loaded(case.store) as model, without_programs(case.store) as plain:
        decoded(model, prompt, tokens)
        for it in (model, plain):
            module, _, number = f"model.layers.1.{path}".rpartition(".")
            setattr(it.get_submodule(module), number, 1)
        before = num_run(model)
        assert torch.equal(*(decoded(it, prompt, tokens) for it in (model, plain)))
        assert num_run(model) == before + 2 * len(tokens)


def test_a_cache_of_another_model_is_refused_as_by_transformers(cases: Cases, tmp_path: Path) -> None:
    """Not written beyond its end: here one of fewer heads, or of narrower ones."""
    case = cases["qwen3_moe"]
    prompt, tokens = case.prompts[0], case.tokens[0]
    usual = FAMILIES["qwen3_moe"].config
    for number, more in enumerate([{"num_key_value_heads": 1}, {"head_dim": 4}]):
        folder = make_checkpoint(Family("qwen3_moe", 3, 3, usual | more), tmp_path / str(number))
        with loaded(case.store) as model, loaded(folder) as another, torch.no_grad():
            decoded(model, prompt, tokens)
            cache = another(torch.tensor([prompt]), use_cache=True).past_key_values
            token = torch.tensor([tokens[:1]])
            another(token, past_key_values=cache)
            with pytest.raises(RuntimeError, match=r"[Ss]ize"):
                model(token, past_key_values=cache)


def test_a_layer_that_was_not_reached_keeps_its_cache(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the experts of the one before it could not be read: whoever goes on finds no keys that nobody wrote."""
    case = cases["qwen3_moe"]
    prompt, tokens = case.prompts[0], case.tokens[0]
    with loaded(case.store, system="on-demand") as model, torch.no_grad():
        decoded(model, prompt, tokens)
        cache = model(torch.tensor([prompt]), use_cache=True).past_key_values
        token = torch.tensor([tokens[:1]])
        for _ in range(2):
            model(token, past_key_values=cache)
        runtime, usual, before = type(handle(model).engine), type(handle(model).engine).forward_experts, num_run(model)

        def failing(self: Any, module: Any, layer: int, *call: Any) -> torch.Tensor:
            if layer == 1:
                raise OSError("a disk that is gone")
            return usual(self, module, layer, *call)

        monkeypatch.setattr(runtime, "forward_experts", failing)
        with pytest.raises(OSError, match="is gone"):
            model(token, past_key_values=cache)
        assert num_run(model) == before + 1
        lengths = [cache.get_seq_length(layer) for layer in range(3)]
        assert lengths == [len(prompt) + 3, len(prompt) + 3, len(prompt) + 2]


def test_what_other_threads_compute_is_not_noted(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits that one computes while another's layers are noted stay its own."""
    case, logits = cases["qwen3_moe"], list[torch.Tensor]()
    with loaded(case.store) as model:
        usual = programs.Notes.begin

        def noting(self: Any) -> None:
            usual(self)
            thread = threading.Thread(target=lambda: logits.append(compute()))
            thread.start()
            thread.join()

        def compute() -> torch.Tensor:
            with torch.no_grad():
                return model.lm_head(torch.ones(1, 1, model.config.hidden_size))  # type: ignore[no-any-return]

        monkeypatch.setattr(programs.Notes, "begin", noting)
        generate(model, case.prompts[:1])
        assert logits
        for some in logits:
            some.zero_()
        assert generate(model, case.prompts[:1]) == case.tokens[:1]
        assert num_run(model) > 0 and not any(map(torch.any, logits))


def test_an_observer_sees_every_layer(cases: Cases) -> None:
    """And an engine that is stopped computes none."""
    case, layers = cases["qwen3_moe"], []

    class Observer:
        wants_token_ids = False

        def begin_iteration(self, info: Any) -> None: ...

        def end_iteration(self, ok: bool) -> None: ...

        def router_ran(self, layer: int, *_: Any) -> None:
            layers.append(layer)

    with loaded(case.store) as model:
        generate(model, case.prompts[:1])
        handle(model).engine.observer = Observer()
        assert generate(model, case.prompts[:1]) == case.tokens[:1]
        assert layers == [0, 1, 2] * len(case.tokens[0])


def test_a_layer_whose_operations_depend_on_numbers_stays(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """And stats say which operation it is."""
    usual = Qwen3MoeSparseMoeBlock.forward

    def torchs(self: Any, hidden_states: torch.Tensor) -> Any:
        return usual(self, hidden_states.cumsum(-1).diff(dim=-1, prepend=hidden_states[..., :1] * 0))

    def dependent(self: Any, hidden_states: torch.Tensor) -> Any:
        return usual(self, hidden_states if hidden_states.sum().item() > 0 else hidden_states * 1)

    more = {"cumsum", "diff", "sum", "item"}
    monkeypatch.setattr(graphs, "_NAMES", graphs._NAMES | more)
    case = cases["qwen3_moe"]
    for changed, why in ((torchs, ""), (dependent, "aten._local_scalar_dense.default (3 layers)")):
        monkeypatch.setattr(Qwen3MoeSparseMoeBlock, "forward", changed)
        with loaded(case.store) as model, without_programs(case.store) as plain:
            assert generate(model, case.prompts[:1]) == generate(plain, case.prompts[:1])
            assert (num_run(model) > 0) == (not why)
            assert expertly.stats(model).as_dict()["kernels"]["stopped"] == why


def test_a_program_that_gives_other_numbers_is_not_used(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one whose norms have a larger epsilon than the layer's."""
    case, usual = cases["qwen3_moe"], native_kernels.double_bits
    monkeypatch.setattr(native_kernels, "double_bits", lambda value: usual(value * 1.5))
    with loaded(case.store) as model:
        for _ in range(2):
            assert generate(model, case.prompts[:1]) == case.tokens[:1]
        assert num_run(model) == 0
        stopped = expertly.stats(model).as_dict()["kernels"]["stopped"]
        assert stopped == "other numbers than the layer's own (3 layers)"


def test_programs_keep_neither_caches_nor_layers_alive(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store) as model:
        with torch.no_grad():
            cache = model(torch.tensor(case.prompts[:1]), use_cache=True).past_key_values
            for token in case.tokens[0]:
                model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        assert num_run(model) > 0
        caches = list(map(weakref.ref, (cache, *cache.layers)))
        del cache
        gc.collect()
        assert not any(cache() for cache in caches)
        layers = [weakref.ref(layer) for layer in model.model.layers]
    del model
    gc.collect()
    assert all(layer() is None for layer in layers)


@torch.no_grad()
def test_the_next_router_is_asked_by_the_program_and_says_what_it_says_by_itself(monkeypatch: pytest.MonkeyPatch):
    """A predictor is shown the same as where no layer is a program, and nobody asks a router from Python."""
    asked: list[int] = []
    scores = HookedRouter.scores
    monkeypatch.setattr(HookedRouter, "scores", lambda self, x: (asked.append(self.layer), scores(self, x))[1])
    quality, num_asked = [], []
    for has_programs in (False, True):
        model, tokenizer = expertly.load(system="expertly-ahead", memory="50%", device="cpu")
        try:
            for module in model.modules() if not has_programs else ():
                if "_expertly_graphs" in vars(module):
                    module._expertly_graphs = None
            ids = tokenizer("The old man looked at the sea and", return_tensors="pt")["input_ids"]
            logits, cache = forward(model, ids, None)
            for number in range(16):
                if number == 8:
                    asked.clear()
                logits, cache = forward(model, logits.argmax(-1).reshape(1, 1), cache)
            decode = expertly.stats(model).as_dict()["phases"]["decode"]
        finally:
            expertly.unload(model)
        quality.append([decode[key] for key in ("predicted", "predicted_needed", "predicted_of")])
        num_asked.append(len(asked))
    assert quality[0] == quality[1] and quality[0][1] > 0
    assert num_asked[0] > 0 == num_asked[1]
