"""OpenAI's own Python client against the demo model."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import openai
import pytest
import torch

from expertly.serve.memory import PAGE_TOKENS
from tests.serve.conftest import Serving, greedy, greedy_end, plain_demo

PROMPT = "Once upon a time, there was"


CHAT_PROMPT = f"<|user|>{PROMPT}<|assistant|>"
"""As the demo model's template writes it."""


def test_models(serving: Serving) -> None:
    models = serving.client.models.list().data
    assert [model.id for model in models] == ["demo"]
    told: Any = models[0].model_extra
    assert told["expertly"]["batching"] == "continuous"
    memory = told["expertly"]["memory"]
    assert told["expertly"]["size_bytes"] > memory["dense_bytes"] > 0 and memory["kv_cache_bytes"] > 0
    assert serving.client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError) as error:
        serving.client.models.retrieve("other")
    assert error.value.code == "model_not_found"


def test_small_answers_are_sent_at_once(serving: Serving) -> None:
    """Not 40 ms later, when the client has acknowledged the answer's head."""
    times_s = []
    with serving.http() as client:
        while len(times_s) < 20 or (len(times_s) < 200 and min(times_s[20:], default=1.0) >= 0.03):  # a busy machine
            begin = time.perf_counter()
            client.get("/health")
            times_s.append(time.perf_counter() - begin)
    assert min(times_s[20:]) < 0.03


def test_an_answer_is_what_generate_writes_streamed_or_not(serving: Serving, demo: tuple[Any, Any]) -> None:
    got = serving.complete(PROMPT, 24)
    assert (got.choices[0].text, got.choices[0].finish_reason) == (greedy(*demo, PROMPT, 24), "length")
    assert (got.usage.completion_tokens, got.usage.total_tokens) == (24, 24 + got.usage.prompt_tokens)
    expected, reason = greedy_end(*demo, CHAT_PROMPT, 24)
    answered = serving.chat(PROMPT)
    whole = answered.choices[0]
    assert (whole.message.content, whole.finish_reason) == (expected, reason)
    chunks = list(serving.chat(PROMPT, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == reason
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == answered.usage.completion_tokens
    for chunk in chunks:
        type(chunk).model_validate(chunk.model_dump(), strict=True)
    assert len(chunks) > 10, "it came as it was written"


def test_fields_that_tune_are_honoured_and_unknown_ones_named_once(
    serving: Serving, demo: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    expected = greedy(*demo, PROMPT, 12)
    unknown = {"no_such_field": {"a": 1}, "temperature": 0}
    with caplog.at_level(logging.INFO, "expertly.serve"):
        for extra in ({"top_k": 1.0}, {"min_p": 1.0}, {"top_k": -1, "temperature": 0}, unknown, unknown):
            assert serving.complete(PROMPT, 12, temperature=1, extra_body=extra).choices[0].text == expected, extra
    assert caplog.text.count("no_such_field") == 1
    penalised = serving.complete(PROMPT, 12, extra_body={"repetition_penalty": 1.5}).choices[0].text
    inputs = demo[1](PROMPT, return_tensors="pt", return_token_type_ids=False)
    written = plain_demo().generate(**inputs, max_new_tokens=12, do_sample=False, repetition_penalty=1.5)
    text = demo[1].decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert penalised == text != expected
    free, penalised = (serving.complete("The sea and", 24, frequency_penalty=f).choices[0].text for f in (0, 2))
    assert len(set(penalised.split())) > len(set(free.split()))


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "degrees": {"type": "integer", "minimum": 0, "maximum": 40}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


def schema_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.mark.parametrize(("temperature", "num_texts"), [(0, 1), (1.5, 2)])
def test_an_answer_follows_its_schema(serving: Serving, temperature: float, num_texts: int) -> None:
    asked = {"temperature": temperature, "seed": 5, "response_format": schema_format(CITY)}
    got = serving.chat("Where is it warm?", 120, **asked, n=num_texts)
    for choice in got.choices:
        said = json.loads(choice.message.content)
        assert said["city"] in ("Oslo", "Rome") and 0 <= said["degrees"] <= 40
        assert choice.finish_reason == "stop"
    streamed = serving.chat("Where is it warm?", 120, **asked, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == got.choices[0].message.content
    completed = serving.complete("Where is it warm?", 120, extra_body=asked, echo=True, logprobs=0)
    assert json.loads(completed.choices[0].text.removeprefix("Where is it warm?"))["city"] in ("Oslo", "Rome")
    fewer = serving.chat("Where?", 8, **(asked | {"response_format": {"type": "json_object"}}))
    assert fewer.choices[0].message.content.lstrip().startswith("{")


def test_stop_strings_end_a_text_before_them(serving: Serving, demo: tuple[Any, Any]) -> None:
    expected = greedy(*demo, PROMPT, 40)
    stop = expected[20:24]  # in the middle of words, tokens or both
    got = serving.complete(PROMPT, 40, stop=[stop])
    assert (got.choices[0].text, got.choices[0].finish_reason) == (expected[: expected.index(stop)], "stop")
    assert got.usage.completion_tokens < 40
    chunks = list(serving.complete(PROMPT, 40, stop=stop, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == expected[: expected.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert not serving.scheduler.running


def test_tokens_that_end_a_text(serving: Serving, demo: tuple[Any, Any]) -> None:
    """The model's own, also by its text, which is never seen, and those that are named."""
    end = {str(demo[1].eos_token_id): 100}
    for more in ({}, {"stop": demo[1].eos_token}):
        got = serving.complete(PROMPT, 10, logit_bias=end, **more)
        assert (got.usage.completion_tokens, got.choices[0].finish_reason, got.choices[0].text) == (1, "stop", "")
    tokens = demo[1].encode(greedy(*demo, PROMPT, 8), add_special_tokens=False)
    got = serving.complete(PROMPT, 8, extra_body={"stop_token_ids": [tokens[5]]}).choices[0]
    assert (got.text, got.finish_reason) == (demo[1].decode(tokens[: tokens.index(tokens[5])]), "stop")


def test_a_seed_repeats_and_others_differ(serving: Serving) -> None:
    def text(seed: int | None) -> str:
        return str(serving.complete(PROMPT, 12, temperature=1, top_p=0.95, seed=seed).choices[0].text)

    first = text(1)
    assert text(1) == first
    assert len({first, text(2), text(None), text(None)}) == 4


def test_several_texts_of_several_prompts(serving: Serving, demo: tuple[Any, Any]) -> None:
    prompts = [PROMPT, "The sea was"]
    got = serving.complete(prompts, n=2)
    expected = [greedy(*demo, prompt, 8) for prompt in prompts]
    assert [choice.text for choice in got.choices] == [expected[0], expected[0], expected[1], expected[1]]
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    with pytest.raises(openai.BadRequestError, match=r"best_of: none is chosen"):
        serving.complete(prompts, n=2, best_of=1)
    sampled = serving.complete(PROMPT, 16, temperature=1, seed=3, n=3)
    assert len({choice.text for choice in sampled.choices}) == 3, "one seed, and yet three texts"


def test_logprobs_are_the_models_own(serving: Serving, demo: tuple[Any, Any]) -> None:
    tokenizer = demo[1]
    got = serving.chat(PROMPT, 4, logprobs=True, top_logprobs=3)
    logprobs = got.choices[0].logprobs
    ids = tokenizer(CHAT_PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        expected = torch.log_softmax(plain_demo()(ids).logits[0, -1].float(), dim=-1).topk(3)
    first = logprobs.content[0]
    assert [top.logprob for top in first.top_logprobs] == pytest.approx(expected.values.tolist(), abs=1e-3)
    assert [top.token for top in first.top_logprobs] == [tokenizer.decode([i]) for i in expected.indices.tolist()]
    assert first.logprob == pytest.approx(float(expected.values[0]), abs=1e-3)
    assert bytes(b for token in logprobs.content for b in token.bytes).decode() == got.choices[0].message.content
    completed = serving.complete(PROMPT, 4, logprobs=2)
    told = completed.choices[0].logprobs
    assert "".join(told.tokens) == completed.choices[0].text
    assert all(len(top) == 2 for top in told.top_logprobs)


def test_echo_tells_the_prompt_and_its_logprobs(serving: Serving, demo: tuple[Any, Any]) -> None:
    streamed = serving.complete(demo[1].encode(PROMPT), echo=True, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == PROMPT + greedy(*demo, PROMPT, 8)
    got = serving.complete([PROMPT, "The sea"], 1, logprobs=1, echo=True)
    for choice, prompt in zip(got.choices, (PROMPT, "The sea"), strict=True):
        told: Any = choice.logprobs
        ids = demo[1](prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            all_of_them = torch.log_softmax(plain_demo()(ids).logits[0].float(), dim=-1)
        expected = all_of_them[:-1].gather(1, ids[0, 1:, None])[:, 0]
        assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
        assert told.token_logprobs[1:-1] == pytest.approx(expected.tolist(), abs=1e-3)
        assert "".join(told.tokens) == choice.text == prompt + greedy(*demo, prompt, 1)
    assert got.usage.completion_tokens == 2
    assert got.usage.prompt_tokens == sum(len(demo[1].encode(prompt)) for prompt in (PROMPT, "The sea"))


SAID = "The captain looked at the sea. " * 30


def test_tokens_of_a_prompt_that_need_not_be_computed_again_are_counted(
    serving: Serving, demo: tuple[Any, Any]
) -> None:
    start = f"<|user|>{SAID}"
    first, second = (serving.complete(f"{start}{end}", 2).usage for end in ("He", "She"))
    assert first.prompt_tokens_details.cached_tokens == 0
    num_same = len(demo[1].encode(start))
    assert second.prompt_tokens_details.cached_tokens == num_same // PAGE_TOKENS * PAGE_TOKENS > 0
    again = serving.client.responses.create(model="demo", input=SAID, max_output_tokens=2, temperature=0.5)
    assert (again.max_output_tokens, again.temperature, again.top_p) == (2, 0.5, 1), "it says how it was asked for"
    assert again.usage is not None and again.usage.input_tokens_details.cached_tokens > 0


def test_bytes_of_tokens_that_are_parts_of_characters(serving: Serving, demo: tuple[Any, Any]) -> None:
    text = "日本語 🙂 schön"
    ids = demo[1].encode(text)
    assert any("\N{REPLACEMENT CHARACTER}" in demo[1].decode([token]) for token in ids)
    assert b"".join(serving.assembled.service.prompts.piece(token)[1] for token in ids).decode() == text


REFUSED: dict[str, Any] = {
    "model": {"model": "gpt-4"},
    "messages": {"messages": [{"role": "user", "content": "a " * 600}]},
    "n": {"n": 17},
    "response_format.json_schema": {"response_format": {"type": "json_schema"}},
    "response_format": {"response_format": schema_format({"$ref": "https://example.org/x"})},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "logit_bias": {"logit_bias": {"9000000": 1}},
    "messages.0.content": {"messages": [{"role": "user"}]},
    "messages.0.content.0.type": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    **{
        name: {"extra_body": {name: value}}
        for name, value in {
            "temperature": 3,
            "max_tokens": "7",
            "modalities": 5,
            "audio": {"voice": "x"},
            "functions": [{"name": "f"}],
            "guided_json": CITY,
            "grammar": 'root ::= "a"',
            "use_beam_search": True,
            "stop_token_ids": [9_000_000],
            "top_k": 5.5,
            "reasoning_effort": "ultra",
            "top_logprobs": 2,
        }.items()
    },
}


@pytest.mark.parametrize("param", REFUSED)
def test_errors_are_openais(serving: Serving, param: str) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        serving.chat("Hello", **({"max_tokens": 4} | REFUSED[param]))
    assert raised.value.status_code == (404 if param == "model" else 400)
    assert (raised.value.type, raised.value.param) == ("invalid_request_error", param)
    assert param in raised.value.message and "Value error" not in raised.value.message
    if param.endswith(".type"):
        assert "should be 'text', 'input_text' or 'output_text', not \"image_url\"" in raised.value.message
