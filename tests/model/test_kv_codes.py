"""The KV cache in 8 bits: what it keeps, what it costs, and that it is the same however a text comes to be in it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig
from transformers.cache_utils import DynamicCache

import expertly
from expertly.core.errors import ConfigError
from expertly.model import dense, kv_codes
from expertly.model.hooks import CACHE
from expertly.model.kv_codes import NUM_TOKENS, decoded, encoded
from expertly.model.needs import kv_cache_nbytes
from expertly.model.pages import kind_of_pages
from expertly.store.pages import KeptPages
from tests.families import FAMILIES, generate, load_reference, make_checkpoint
from tests.model.test_turns import Passes, drawn

pages_of_codes = pytest.mark.skipif(
    not hasattr(ContinuousBatchingConfig, "page_size"), reason="transformers 5.17 has other pages"
)


@contextmanager
def loaded(folder: Path, kv: Any = "8bit", **options: Any) -> Iterator[Any]:
    model, _ = expertly.load(str(folder), kv=kv, memory="100%", device="cpu", **options)
    try:
        yield model
    finally:
        expertly.unload(model)


def rounded(numbers: torch.Tensor, factors: torch.Tensor | float = 1.0) -> torch.Tensor:
    """As it is written down: a token's numbers of a head, over factors, in steps of a 127th of the largest."""
    numbers = numbers / factors
    step = (numbers.abs().amax(-1, keepdim=True) / 127).bfloat16().float()
    return torch.where(step > 0, numbers / step, 0).round() * step * factors


def rounding_cache(model: Any, factors: dict[int, torch.Tensor]) -> DynamicCache:
    """Of transformers, but that keys and values are rounded before it keeps them."""
    cache = DynamicCache(config=model.config)
    for number, of_layer in factors.items():
        layer: Any = cache.layers[number]

        def update(keys: Any, values: Any, *args: Any, usual: Any, of_layer: Any, **kwargs: Any) -> Any:
            return usual(rounded(keys, of_layer[:, None]), rounded(values), *args, **kwargs)

        layer.update = partial(update, usual=layer.update, of_layer=of_layer)
    return cache


def logits_by(model: Any, cache: Any, parts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Of each token of a text, which is read in parts."""
    with torch.no_grad():
        return torch.cat([model(torch.tensor([part]), **{CACHE: cache}).logits[0] for part in parts])


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_that_of_a_cache_with_rounded_keys_and_values(family: str, tmp_path: Path) -> None:
    """Prompt, some tokens at once, and decode steps through the cache, natively where the full one is. A number that
    lies between two steps may be rounded to the other one.
    """
    folder = make_checkpoint(family, tmp_path / "model")
    text, reference = drawn(64, 1), load_reference(folder)
    parts = [text[:40], text[40:43], *([token] for token in text[43:])]
    with loaded(folder, kv=None) as model:
        logits_by(model, DynamicCache(config=model.config), parts)
        natively = expertly.stats(model).as_dict()["kernels"]
    with loaded(folder) as model:
        factors, cache = model._expertly_kv_codes.of_layers, DynamicCache(config=model.config)
        made = logits_by(model, cache, parts)
        kernels = expertly.stats(model).as_dict()["kernels"]
    expected = logits_by(reference, rounding_cache(reference, factors), parts)
    error = (made - expected).abs().amax(-1) / expected.abs().max()
    assert error.median() < 1e-5 and error.max() < 5e-3, error
    assert (kernels["programs"], kernels["stopped"]) == (natively["programs"], natively["stopped"])


def test_factors_are_the_largest_keys_of_a_text_and_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rounding costs, too. A file that is damaged is measured again."""
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path))
    folder = make_checkpoint("qwen3_moe", tmp_path / "model")
    reference = load_reference(folder)
    plain, text = DynamicCache(config=reference.config), [number % 128 for number in range(NUM_TOKENS)]
    last = logits_by(reference, plain, [text])[-16:].log_softmax(-1)
    with loaded(folder) as model:
        first, path = model._expertly_kv_codes, expertly.api.handle(model).store.folder
        assert expertly.stats(model).as_dict()["phases"]["prefill"]["iterations"] == 2
    rounding = logits_by(reference, rounding_cache(reference, first.of_layers), [text])[-16:].log_softmax(-1)
    assert first.divergence == pytest.approx(float((last.exp() * (last - rounding)).sum(-1).mean()), rel=0.02)
    for number, layer in enumerate(plain.layers):
        largest = layer.keys.abs().amax((0, 2))
        assert torch.allclose(first.of_layers[number], largest.maximum(largest.amax(-1, keepdim=True) / 64), rtol=1e-4)
    with loaded(folder) as model:
        again = model._expertly_kv_codes
        assert expertly.stats(model).as_dict()["phases"]["prefill"]["iterations"] == 0
        assert again.divergence == pytest.approx(first.divergence)
        assert all(torch.equal(again.of_layers[number], factors) for number, factors in first.of_layers.items())
    kept = path.with_name(f"{path.name}.kv8")
    kept.write_bytes(kept.read_bytes()[:-8])
    with pytest.warns(UserWarning, match="kv='8bit': measured again: .*kv8"), loaded(folder) as model:
        assert torch.equal(model._expertly_kv_codes.of_layers[0], first.of_layers[0])


def test_it_is_half_as_large_and_the_plan_counts_that(tmp_path: Path) -> None:
    """With heads of 64 numbers in bfloat16; beside it the plan has a layer's numbers for a prompt's attention."""
    family = replace(FAMILIES["qwen3_moe"], config={**FAMILIES["qwen3_moe"].config, "head_dim": 64})
    folder = make_checkpoint(family, tmp_path / "model", dtype=torch.bfloat16)
    sizes, planned = [], []
    for kv in (None, "8bit"):
        with loaded(folder, kv) as model:
            cache = DynamicCache(config=model.config)
            logits_by(model, cache, [drawn(100, 1)])
            sizes.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers))
            handle = expertly.api.handle(model)
            planned.append(handle.division.beside.cache_nbytes)
            assert kv_cache_nbytes(handle.store.config, 1, 2, is_coded=kv is not None) == planned[-1]
            if kv is not None and hasattr(ContinuousBatchingConfig, "page_size"):
                made = Passes(model, num_pages=10)
                made.ask("text", drawn(20, 1), 2)
                made.wait()
                paged = made.batch._manager.batch_processor.cache
                assert paged.cache_tensor.nbytes == (paged.num_sectors + 2) * paged.bytes_per_sector
                assert paged.bytes_per_sector * paged.num_sectors <= 10 * 8 * sizes[1] / 100 + 1024
                made.close()
    one_layer = 2 * 2 * 64 * (2 + 2)
    assert sizes[1] * 256 == sizes[0] * 132 and planned[1] == planned[0] * 132 // 256 + one_layer


@pages_of_codes
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # shares pages of prompts; half of its layers slide
def test_texts_are_the_same_whoever_is_beside_them_and_however_few_pages_there_are(family: str, tmp_path: Path) -> None:
    """They give pages back, are read again in other parts, and share pages; `generate` has the same codes."""
    with loaded(make_checkpoint(family, tmp_path / "model")) as model:
        asked = {str(number): (drawn(20 + 5 * number, number % 3), 40 - 3 * number) for number in range(8)}
        expected = {name: generate(model, [prompt], size)[0] for name, (prompt, size) in asked.items()}
        made = Passes(model, num_pages=14)
        try:
            for name, (prompt, size) in asked.items():
                made.ask(name, prompt, size)
            made.wait()
            assert made.batch.num_preempted() > 0
            assert made.tokens == expected
        finally:
            made.close()


@pages_of_codes
def test_pages_of_codes_are_read_where_they_lie(tmp_path: Path) -> None:
    """As often as pages of numbers are: by programs, for one text and for several side by side."""
    folder, counts = make_checkpoint("qwen3_moe", tmp_path / "model"), []
    for kv in (None, "8bit"):
        with loaded(folder, kv) as model:
            for num_texts in (1, 3):
                made = Passes(model, num_pages=40)
                for number in range(num_texts):
                    made.ask(str(number), drawn(20, number), 9)
                made.wait()
                made.close()
            kernels = expertly.stats(model).as_dict()["kernels"]
            counts.append((kernels["attention"], kernels["programs"]))
    assert counts[0] == counts[1] and counts[1][1] > 20


@pages_of_codes
def test_a_window_of_codes_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a prompt is read, whoever asks makes numbers of no code: alone and side by side."""
    with loaded(make_checkpoint("gpt_oss", tmp_path / "model")) as model:
        cache = DynamicCache(config=model.config)
        logits_by(model, cache, [drawn(30, 1)])

        def forbid(number: int) -> None:
            for module in (kv_codes, dense) if len(made.tokens) == 2 and all(made.tokens.values()) else ():
                monkeypatch.setattr(module, "decoded", None)

        with closing(Passes(model, num_pages=40)) as made:
            made.before = forbid
            for name in ("first", "second"):
                made.ask(name, drawn(30, 2), 6)
            made.wait()
        logits_by(model, cache, [[token] for token in drawn(6, 3)])


@pages_of_codes
def test_a_restart_finds_pages_of_codes_and_no_others(tmp_path: Path) -> None:
    folder, prompt, kinds = make_checkpoint("qwen3_moe", tmp_path / "model"), drawn(60, 1), list[str | None]()
    for kv in ("8bit", "8bit", None):
        with loaded(folder, kv) as model:
            kinds.append(kind_of_pages(model))
            expected = generate(model, [prompt], 10)[0]
            made = Passes(model, 20, pages=KeptPages(tmp_path / "kv", 1 << 20, str(kinds[-1]).encode()))
            made.ask("text", prompt, 10)
            made.wait()
            made.close()
            assert made.tokens["text"] == expected
            assert made.cached["text"] == (56 if len(kinds) == 2 else 0)
    assert kinds[0] == kinds[1] != kinds[2]


def test_a_channel_that_is_larger_than_others_costs_these_nothing() -> None:
    keys = torch.randn(1, 2, 300, 64, generator=torch.Generator().manual_seed(0))
    keys[..., 5] *= 200
    factors = keys[:, :, :50].abs().amax((0, 2))
    for of_keys, least, most in ((1.0, 0.3, 2), (factors[:, None], 0, 0.02)):
        made = decoded(encoded(keys, of_keys), keys.dtype, of_keys)
        errors = ((made - keys).norm(dim=2) / keys.norm(dim=2))[..., torch.arange(64) != 5]
        assert least <= errors.min() and errors.max() < most


@pages_of_codes
def test_a_cache_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    """DeepSeek-V3.2 keeps its indexer's keys, too, with the transformers that keeps pages."""
    usual = FAMILIES["deepseek_v3"]
    config = {**usual.config, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
    folder = make_checkpoint(replace(usual, model_type="deepseek_v32", config=config), tmp_path / "model")
    with pytest.raises(ConfigError, match="kv='8bit': the cache of deepseek_v32 has DynamicIndexedLayer; accepted"):
        expertly.load(str(folder), kv="8bit", device="cpu")


def test_a_width_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv='4bit': unknown; accepted: 8bit"):
        expertly.load(str(tmp_path), kv="4bit", device="cpu")


def test_caches_are_those_of_the_model_that_filled_them(tmp_path: Path) -> None:
    """A model with a full cache goes on with one of codes, and the other way round; beams and copies are kept apart."""
    folder, text = make_checkpoint("qwen3_moe", tmp_path / "model"), drawn(30, 1)
    with loaded(folder) as coding, loaded(folder, kv=None) as plain:
        for first, second in ((coding, plain), (plain, coding)):
            cache = DynamicCache(config=first.config)
            logits_by(first, cache, [text[:20]])
            kinds = [type(layer) for layer in cache.layers]
            copied = copy.deepcopy(cache)
            made = logits_by(second, cache, [[token] for token in text[20:]])
            expected = logits_by(first, copied, [[token] for token in text[20:]])
            assert [type(layer) for layer in cache.layers] == kinds
            assert torch.allclose(made, expected, rtol=1e-3, atol=1e-4)
        several = {"num_beams": 3, "num_return_sequences": 2}
        full = generate(plain, [text, text[:12]], 8, **several)
        assert generate(coding, [text, text[:12]], 8, **several) == full
