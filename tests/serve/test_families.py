"""Families whose requests cannot share a forward pass are served all the same, one at a time, and that is said."""

from __future__ import annotations

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoTokenizer

import expertly
from expertly.core.errors import ConfigError, NanError
from expertly.model.batching import why_not_together
from expertly.model.generation import generate, generation_config
from expertly.serve.memory import PAGE_TOKENS
from expertly.serve.server import open_server
from expertly.serve.settings import ServeOptions
from tests.families import fill_with_nan, load_reference, make_checkpoint
from tests.serve.conftest import greedy, room_for, served
from tests.waiting import until


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_each_family_writes_what_generate_writes(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = make_checkpoint(family, tmp_path / family, tokenizer=True)
    model, tokenizer = expertly.load(str(folder), memory="50%", device="cpu", dtype="float32")
    reference = load_reference(folder)
    texts = ["ask", "an expert", "segments"]
    expected = [greedy(reference, tokenizer, text, 6) for text in texts]
    with served(model, tokenizer, room_for(context=128, max_running=4), served_model_name=family) as serving:
        told: Any = serving.client.models.retrieve(family).model_extra
        together = family in ("qwen3_moe", "gpt_oss")
        assert told["expertly"]["batching"] == ("continuous" if together else "one at a time")
        assert (told["expertly"]["batching_reason"] is None) == together
        with ThreadPoolExecutor() as pool:
            answers = pool.map(lambda text: serving.complete(text, 6, model=family), texts)
            assert [answer.choices[0].text for answer in answers] == expected
        several = serving.complete(texts[0], 6, model=family, n=2)
        assert [choice.text for choice in several.choices] == [expected[0]] * 2
        if not together:  # who goes makes room for the next
            with contextlib.closing(serving.complete("ask", 100, model=family, stream=True)) as chunks:
                next(chunks)
            assert serving.complete("ask", 2, model=family).choices[0].finish_reason == "length"
            assert not serving.scheduler.running
    expertly.unload(model)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "qwen3_next", "lfm2_moe", "jamba"])
def test_a_second_turn_reads_only_what_is_new(family: str, tmp_path: Path) -> None:
    """Of a cache that is cut, of pages whose layers have windows, and of states that cannot be cut and go on. Jamba's
    begin anew. Who asks something else in between is answered as by `generate`.
    """
    torch.set_num_threads(1)
    folder = make_checkpoint(family, tmp_path / family, tokenizer=True)
    model, tokenizer = expertly.load(str(folder), memory="50%", device="cpu", dtype="float32")
    reference = load_reference(folder)
    with served(model, tokenizer, room_for(context=256, max_running=4), served_model_name=family) as serving:

        def ask(tokens: list[int]) -> tuple[list[int], int]:
            """The answer, and how many tokens of the prompt were computed."""
            before = expertly.stats(model).as_dict()["phases"]
            ids = torch.tensor([tokens])
            expected = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
            written = expected[0, len(tokens) :].tolist()
            answer = serving.complete(tokens, 8, model=family)
            assert answer.choices[0].text == tokenizer.decode(written, skip_special_tokens=True)
            after, counts = expertly.stats(model).as_dict()["phases"], answer.usage.prompt_tokens_details
            num_read = sum(after[phase]["tokens"] - before[phase]["tokens"] for phase in after) - (len(written) - 1)
            assert num_read == len(tokens) - counts.cached_tokens, "what it says is what it did"
            return written, num_read

        first = [3 + number % 50 for number in range(70)]
        second = [*first, *ask(first)[0], *range(5, 40)]
        num_new = {"jamba": len(second), "gpt_oss": len(second) - 2 * PAGE_TOKENS}.get(family, 36)
        assert ask(second)[1] == num_new, "35, and the answer's last; of pages, what fills none"
        if family == "deepseek_v3":  # another end of what was said
            assert ask([*second[:90], 7, 8])[1] == 2
        ask([9, 8, 7, 6])
        ask(second)
    expertly.unload(model)


def test_who_goes_while_a_prompt_is_read_ends_it_at_the_next_layer(tmp_path: Path) -> None:
    """Where requests run one at a time, and a prompt is read in one pass."""
    folder = make_checkpoint("deepseek_v3", tmp_path / "model", tokenizer=True)
    model, tokenizer = expertly.load(str(folder), memory="50%", device="cpu", dtype="float32")
    executor = expertly.api.handle(model).engine.executor  # type: ignore[attr-defined]
    run_layer, begun, layers = executor.run_layer, threading.Event(), list[int]()
    with served(model, tokenizer, room_for(context=256, max_running=4), served_model_name="demo") as serving:

        def slow(work: Any, *more: Any) -> Any:
            layers.append(work.router.layer)
            if not begun.is_set():
                begun.set()
                until(lambda: not serving.scheduler.running)
            return run_layer(work, *more)

        expected = greedy(load_reference(folder), tokenizer, "ask", 2)
        executor.run_layer = slow
        body = {"model": "demo", "prompt": [5] * 200, "max_tokens": 20}
        connection = HTTPConnection(serving.url.removeprefix("http://"))
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        assert begun.wait(60)
        connection.close()
        assert serving.complete("ask", 2).choices[0].text == expected
        assert layers[:3] == [0, 0, 1], "one of two layers of the prompt, then both of the next"
    expertly.unload(model)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])  # many in one pass, and one at a time
@pytest.mark.parametrize("is_special", [False, True])
def test_stop_strings_of_the_models_config_end_texts(family: str, is_special: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path / family, tokenizer=True)
    reference, tokenizer = load_reference(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("ask", return_tensors="pt", return_token_type_ids=False)
    tokens = reference.generate(**inputs, max_new_tokens=12, do_sample=False)[0, 3:].tolist()
    stop = tokenizer.decode(tokens[4:5] if is_special else tokens[4:6])
    if is_special:
        tokenizer.add_special_tokens({"additional_special_tokens": [stop]})
        tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"stop_strings": [stop]}))
    expected = reference.generate(
        **inputs, max_new_tokens=12, do_sample=False, stop_strings=[stop], tokenizer=tokenizer
    )
    assert expected.shape[1] < 3 + 12
    model, tokenizer = expertly.load(str(folder), memory="50%", device="cpu", dtype="float32")
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), expected)
    assert torch.equal(generate(model, inputs["input_ids"][0].tolist(), generation_config(model, 12)), expected)
    with served(model, tokenizer, room_for(context=128, max_running=4), served_model_name=family) as serving:
        got = serving.complete("ask", 12, model=family).choices[0]
        text = tokenizer.decode(tokens)
        assert (got.text, got.finish_reason) == (text[: text.index(stop)], "stop")
    expertly.unload(model)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_nan_is_told_with_its_layer_and_the_server_goes_on(family: str, tmp_path: Path) -> None:
    """In one pass for many, and one at a time; streamed, too."""
    folder = make_checkpoint(family, tmp_path / family, tokenizer=True)
    model, tokenizer = expertly.load(str(folder), memory="50%", device="cpu", dtype="float32")
    weight = model.get_submodule("model.norm").weight.data
    before = weight.clone()
    with served(model, tokenizer, room_for(context=128, max_running=4), served_model_name=family) as serving:
        expected = serving.complete("ask", 6, model=family).choices[0].text
        weight.fill_(torch.nan)
        for is_stream in (False, True):
            with pytest.raises(openai.APIError, match="the dense part after the last MoE layer gave NaN: ") as raised:
                list(serving.complete("ask", 6, model=family, stream=is_stream))
            assert is_stream or raised.value.status_code == 500
        weight.copy_(before)
        assert serving.complete("ask", 6, model=family).choices[0].text == expected
    expertly.unload(model)


def test_a_model_whose_weights_hold_nan_is_not_served(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "model", tokenizer=True)
    fill_with_nan(folder, "model.layers.1.mlp.experts")
    with pytest.raises(NanError, match="the experts of MoE layer 1 gave NaN: the checkpoint's weights hold NaN"):
        open_server(ServeOptions(model=str(folder), memory="50%", device="cpu"))


def test_trying_leaves_nothing_behind(demo: tuple[Any, Any]) -> None:
    before = {thread.name for thread in threading.enumerate()}
    assert why_not_together(demo[0], 32) is None
    assert {thread.name for thread in threading.enumerate()} <= before


def test_a_model_without_a_tokenizer_is_refused(demo: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"), served(demo[0], None):
        pass
