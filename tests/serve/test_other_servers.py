"""What clients of other local servers send and expect, beside OpenAI's own."""

from __future__ import annotations

import asyncio
import copy
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from expertly.cli.main import main
from expertly.serve import app
from expertly.serve.server import SILENT_S, ApiServer
from tests.commands import RunningCommand
from tests.serve.conftest import KEY, Serving, assembled_for, greedy, room_for, running, served
from tests.serve.scripted import scripted
from tests.serve.test_formats import BY_NAME, saying

SAID = [{"role": "user", "content": "Hello"}]
FUNCTION = {"type": "function", "function": {"name": "f"}}
BEGUN = {"messages": [*SAID, {"role": "assistant", "content": "{"}], "continue_final_message": True}


def post(serving: Serving, path: str, **body: Any) -> httpx.Response:
    with serving.http() as client:
        return client.post(path, json=body)


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("completions", {"stop": [""]}, "stop.0", 'at least 1 character, not ""'),
    ("completions", {"stop": ["a"] * 17}, "stop", "at most 16 items"),
    ("completions", {"stop": {"a": 1}}, "stop", "a valid string or a valid list"),
    ("completions", {"prompt": [5, "a"]}, "prompt.1", 'a valid integer, not "a"'),
    ("completions", {"prompt": [-1]}, "prompt.0", "greater than or equal to 0, not -1"),
    ("completions", {"prompt": 5}, "prompt", "a valid string or a valid list, not 5"),
    ("completions", {"prompt": "a " * 600}, "prompt", "accepted: 512 together with those to write"),
    ("completions", {"max_tokens": 0}, "max_tokens", "greater than or equal to 1, not 0"),
    ("completions", {"repetition_penalty": 1e-300}, "repetition_penalty", "or equal to 0.01, not 1e-300"),
    ("completions", {"best_of": 3}, "best_of", "the value of n"),
    ("completions", {"logit_bias": {"a": 1}}, "logit_bias.a", "match pattern"),
    ("chat/completions", {"tool_choice": "f"}, "tool_choice", "'required' or 'any', not \"f\""),
    ("chat/completions", {"tool_choice": {"type": "any"}}, "tool_choice.type", "'function', not \"any\""),
    ("chat/completions", {"tool_choice": "any"}, "tool_choice", "ignored; accepted: auto or none"),
    ("chat/completions", {"tool_choice": FUNCTION, "tools": []}, "tool_choice", "ignored; accepted: auto or none"),
    ("chat/completions", {"temperature": 2.5}, "temperature", "less than or equal to 2, not 2.5"),
    ("chat/completions", {"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content.0", 'not "a"'),
    ("chat/completions", {"continue_final_message": True}, "continue_final_message", "an assistant's text"),
    ("chat/completions", BEGUN | {"response_format": {"type": "json_object"}}, "continue_final_message", "no schema"),
    ("chat/completions", BEGUN | {"structured_outputs": {"regex": "a"}}, "continue_final_message", "no schema"),
    ("chat/completions", BEGUN | {"tools": [FUNCTION], "tool_choice": "any"}, "continue_final_message", "forced call"),
    ("chat/completions", {"messages": [SAID[0] | {"prefix": True}]}, "messages.0.prefix", "use continue_final_message"),
    *(
        ("chat/completions", {"chat_template_kwargs": {name: []}}, f"chat_template_kwargs.{name}", "the request")
        for name in ("messages", "tools", "self", "conversations", "add_generation_prompt", "continue_final_message")
    ),
    ("responses", {"input": "a " * 600}, "input", "accepted: 512 together"),
    ("responses", {"input": None}, "input", "a valid string or a valid list, not null"),
    ("responses", {"text": {"format": {"type": "json_schema"}}}, "text.format.json_schema", "or schema"),
    ("tokenize", {}, "prompt", "required, or messages"),
]


@pytest.mark.parametrize(("path", "fields", "param", "said"), WRONG)
def test_an_error_names_field_value_and_what_is_accepted(
    serving: Serving, path: str, fields: dict[str, Any], param: str, said: str
) -> None:
    whole = {"completions": {"prompt": "a"}, "chat/completions": {"messages": SAID}, "responses": {"input": "a"}}
    got = post(serving, f"/v1/{path}" if path in whole else f"/{path}", **(whole.get(path, {}) | fields))
    error = got.json()["error"]
    assert (got.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ") and said in error["message"]


WHOLE: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": SAID, "max_tokens": 4},
    "completions": {"prompt": "a", "max_tokens": 4},
    "responses": {"input": "a", "max_output_tokens": 4},
    "messages": {"messages": SAID, "max_tokens": 4},
}
OWN = {
    "chat/completions": "n logprobs top_logprobs max_tokens max_completion_tokens response_format structured_outputs"
    " reasoning_effort chat_template_kwargs tools messages",
    "completions": "n logprobs max_tokens response_format structured_outputs echo prompt best_of",
    "responses": "max_output_tokens reasoning instructions tools chat_template_kwargs",
    "messages": "max_tokens system stop_sequences thinking tools output_format messages",
}
"""Fields of each API that others have not."""

ASKS = (
    "bad_words prompt_logprobs truncate_prompt_tokens json_schema grammar guided_json"
    " n_predict max_new_tokens typical_p mirostat repeat_penalty length_penalty no_repeat_ngram_size use_beam_search"
    " include_stop_str_in_output skip_special_tokens chat_template documents enable_thinking audio"
    " mcp_servers functions function_call background previous_response_id conversation suffix "
) + " ".join(OWN.values())


@pytest.mark.parametrize("path", WHOLE)
def test_a_field_that_would_change_the_answer_is_honoured_or_refused(demo: tuple[Any, Any], path: str) -> None:
    """In all APIs by one rule. What changes nothing is accepted: null, the default, and fields about the client."""
    with running(scripted(assembled_for(*demo), "Hello there", demo[1])) as serving:
        refused = set(ASKS.split()) - set(OWN[path].split())
        for name in refused:
            for value in (False,) if name == "skip_special_tokens" else (5, 0) if name == "prompt_logprobs" else (5,):
                got = post(serving, f"/v1/{path}", **WHOLE[path], **{name: value})
                assert got.status_code == 400 and f"{name}: " in got.json()["error"]["message"], name
        of_client = {"user": "a", "metadata": {"a": "b"}, "store": True, "cache_prompt": True, "service_tier": "auto"}
        for neutral in (dict.fromkeys(refused), dict.fromkeys(refused & {"n", "typical_p", "repeat_penalty"}, 1)):
            assert post(serving, f"/v1/{path}", **WHOLE[path], **neutral, **of_client).status_code == 200
        got = post(serving, f"/v1/{path}", **WHOLE[path], ignore_eos=True).json()["usage"]
        assert got.get("output_tokens", got.get("completion_tokens")) == 4, "two words, and what would end them"


def test_tokens_that_may_come_and_how_many_must(demo: tuple[Any, Any], serving: Serving) -> None:
    tokenizer = demo[1]
    likely = {str(tokenizer.eos_token_id): 100}
    (sea, *_), allowed = tokenizer.encode(" sea", add_special_tokens=False), tokenizer.encode("the of")[:2]
    for settings in ({}, {"temperature": 1, "seed": 3}):
        got = serving.complete("The", 9, logit_bias=likely, extra_body={"min_tokens": 5}, **settings)
        assert (got.usage.completion_tokens, got.choices[0].finish_reason) == (6, "stop"), "five, and the end"
        got = serving.complete("The", 9, extra_body={"allowed_token_ids": allowed}, logprobs=0, **settings)
        assert set(got.choices[0].logprobs.tokens) <= {tokenizer.decode([token]) for token in allowed}
        only = {"min_tokens": 5, "allowed_token_ids": [tokenizer.eos_token_id]}
        assert serving.complete("The", 9, extra_body=only, **settings).usage.completion_tokens == 1
    biased = {"logit_bias": {str(sea): 100}, "stop": "sea"}
    assert serving.complete("The", 9, **biased, extra_body={"min_tokens": 3}).choices[0].text == " sea sea sea "


def test_a_grammar_ends_a_text_that_nothing_else_ends(demo: tuple[Any, Any], serving: Serving) -> None:
    end = {str(demo[1].eos_token_id): 100}
    got = serving.complete("The sea", 5, logit_bias=end, extra_body={"ignore_eos": True}).choices[0]
    assert got.finish_reason == "length"
    wish = {"ignore_eos": True, "structured_outputs": {"choice": ["yes"]}}
    got = serving.complete("The sea", 5, logit_bias=end, extra_body=wish).choices[0]
    assert (got.text, got.finish_reason) == ("yes", "stop")
    with saying(demo, BY_NAME["gpt-oss"], "<|channel|>final<|message|>Hi<|return|>") as harmony:
        answers = [
            post(harmony, "/v1/chat/completions", messages=SAID, max_tokens=12, ignore_eos=on) for on in (False, True)
        ]
        reasons = [answer.json()["choices"][0]["finish_reason"] for answer in answers]
        assert reasons == ["stop", "length"]


@pytest.mark.parametrize("limit", [-1, None, 10**12])
def test_a_limit_above_the_context_is_the_context(demo: tuple[Any, Any], limit: int | None) -> None:
    with served(*demo, room_for(context=24, max_running=4)) as serving:
        bias = {str(demo[1].eos_token_id): -100}
        for path, more in ("completions", {"prompt": "The sea"}), ("chat/completions", {"messages": SAID}):
            got = post(serving, f"/v1/{path}", **more, max_tokens=limit, logit_bias=bias).json()
            assert got["usage"]["total_tokens"] == 24 and got["choices"][0]["finish_reason"] == "length"
        told = post(serving, "/v1/responses", input="Hello", max_output_tokens=limit, logit_bias=bias).json()
        assert told["status"] == "incomplete" and told["usage"]["total_tokens"] == 24
        error = post(serving, "/v1/completions", prompt=["a", "b"], n=3, max_tokens=limit).json()["error"]
        assert error["param"] == "n" and "6 texts at a time; accepted: 4" in error["message"]


def test_logprobs_of_no_alternatives_are_those_of_the_chosen_tokens(serving: Serving) -> None:
    got = serving.complete("The sea", 3, logprobs=0).choices[0].logprobs
    assert [list(top.items()) for top in got.top_logprobs] == [
        [pair] for pair in zip(got.tokens, got.token_logprobs, strict=True)
    ]
    unlikely = serving.complete("The sea", 1, logprobs=1, logit_bias={"500": 100}).choices[0].logprobs
    assert len(unlikely.top_logprobs[0]) == 2 and unlikely.tokens[0] in unlikely.top_logprobs[0]


def test_the_last_message_is_continued(demo: tuple[Any, Any], serving: Serving) -> None:
    """With and without a chat template; its spaces count as the template keeps them."""
    talk = [*SAID, {"role": "assistant", "content": "I am the"}]
    asked = {"messages": talk, "max_tokens": 8, "temperature": 0, "continue_final_message": True}
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    without = copy.deepcopy(demo[1])
    without.chat_template = None
    with served(*demo, template=template) as templated, served(demo[0], without) as plain:
        for server, prompt in (plain, "Hello\n\nI am the"), (templated, "<user>Hello\n<assistant>I am the"):
            got = post(server, "/v1/chat/completions", **asked, add_generation_prompt=False).json()
            assert got["choices"][0]["message"]["content"] == greedy(*demo, prompt, 8)
            assert post(server, "/tokenize", **asked).json()["tokens"] == demo[1].encode(prompt)
        open_end = post(templated, "/tokenize", messages=SAID, add_generation_prompt=False).json()["tokens"]
        assert demo[1].decode(open_end) == "<user>Hello\n"
    both = post(serving, "/v1/chat/completions", **asked, add_generation_prompt=True)
    assert both.json()["error"]["param"] == "add_generation_prompt"


def test_tokens_of_texts_and_back(demo: tuple[Any, Any], serving: Serving) -> None:
    text = "日本語 🙂 <|endoftext|> the sea"
    tokens = demo[1].encode(text)
    told = post(serving, "/tokenize", prompt=text, model="demo", return_token_strs=True).json()
    strings = demo[1].convert_ids_to_tokens(tokens)
    assert told == {"count": len(tokens), "max_model_len": 512, "tokens": tokens, "token_strs": strings}
    assert post(serving, "/detokenize", tokens=tokens).json() == {"prompt": text}
    assert post(serving, "/tokenize", prompt="").json() == told | {"count": 0, "tokens": [], "token_strs": None}
    assert post(serving, "/detokenize", tokens=[]).json() == {"prompt": ""}
    assert post(serving, "/detokenize", tokens=[10**6]).json()["error"]["param"] == "tokens"
    assert post(serving, "/tokenize", prompt="a", model="other").status_code == 404


def test_a_model_of_several_names(demo: tuple[Any, Any]) -> None:
    """Requests by any of them, and by none; all are listed with the longest text."""
    with served(*demo, served_model_name=["one", "two,three"]) as serving:
        listed = serving.client.models.list().data
        assert [model.id for model in listed] == ["one", "two", "three"]
        assert listed[0].model_extra is not None and listed[0].model_extra["max_model_len"] == 512
        assert serving.client.models.retrieve("two").id == "two"
        for name, told in ("one", "one"), ("three", "three"), (None, "one"):
            assert serving.complete("a", 1, model=name).model == told
        with pytest.raises(openai.NotFoundError, match="'demo' is not here; accepted: 'one', 'two', 'three'"):
            serving.complete("a", 1, model="demo")


def test_head_is_get_without_a_body_and_405_says_what_is_allowed(serving: Serving) -> None:
    with serving.http() as client:
        for path in ("/", "/health", "/ready", "/v1/models", "/v1/models/demo", "/v1/state", "/metrics"):
            got, head = client.get(path), client.head(path)
            assert (head.status_code, head.content, head.headers.keys()) == (200, b"", got.headers.keys()), path
        assert {*client.post("/health").headers["allow"].split(", ")} == {"GET", "HEAD"}
        assert client.head("/v1/completions").headers["allow"] == "POST"


def test_the_path_of_a_proxy_may_be_cut_off_or_not(demo: tuple[Any, Any]) -> None:
    with served(*demo, root_path="/llm", keys=(KEY,)) as serving, serving.http() as client:
        for prefix in ("", "/llm"):
            assert client.get(f"{prefix}/health").status_code == client.get(f"{prefix}/").status_code == 200
            assert client.get(f"{prefix}/v1/models").status_code == 401
            bearer = {"Authorization": f"Bearer {KEY}"}
            assert client.get(f"{prefix}/v1/models", headers=bearer).json()["data"][0]["id"] == "demo"
        assert client.get("/llmhealth").status_code == 401


def test_a_silent_stream_has_comments(demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """While its request waits for another's end; clients do not see them."""
    monkeypatch.setattr(app, "COMMENT_S", 0.05)
    waits, goes_on = asyncio.Event(), []
    assembled = scripted(assembled_for(*demo, room_for(max_running=1)), "Hello there", demo[1])
    with running(assembled) as serving, serving.http() as client:
        scheduler = serving.scheduler
        loop = scheduler._loop
        monkeypatch.setattr(scheduler, "_fits", lambda request: waits.is_set() and not scheduler.running)
        body = {"prompt": "a", "stream": True, "max_tokens": 8}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            for line in filter(None, stream.iter_lines()):
                goes_on.append(line)
                if len(goes_on) == 3:
                    loop.call_soon_threadsafe(lambda: (waits.set(), scheduler._next()))
        assert goes_on[:3] == [": keep-alive"] * 3 and goes_on[-1] == "data: [DONE]"
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in goes_on if line.startswith("data: {")]
        assert "".join(texts) == "Hello there"


def test_idle_connections_are_kept_longer_than_proxies_keep_theirs(demo: tuple[Any, Any]) -> None:
    assert SILENT_S == 75 == ApiServer(assembled_for(*demo)).config.timeout_keep_alive


@pytest.mark.slow
def test_a_unix_socket(
    start: Callable[..., RunningCommand], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which a killed server leaves behind, and the next one takes; not one that is in use, nor a file."""
    path = tmp_path / "socket"
    for number in (signal.SIGKILL, signal.SIGTERM):
        server = start("serve", "--uds", path, "--memory", "50%", "--context", "64", "--json")
        server.wait_until(lambda server=server: "\n" in server.out)  # type: ignore[misc]
        assert json.loads(server.out)["url"] == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any.name") as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "demo"
        assert main(["serve", "--uds", str(path)]) == 2
        assert "another server does; accepted: a path that is free" in capsys.readouterr().err
        server.send_signal(number)
        server.exit_code(60)
        assert path.exists() == (number == signal.SIGKILL)
    (tmp_path / "file").write_text("kept")
    assert main(["serve", "--uds", str(tmp_path / "file")]) == 2
    assert (tmp_path / "file").read_text() == "kept" and "it is no socket" in capsys.readouterr().err
