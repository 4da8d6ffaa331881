"""Can every client talk to the server? Eight of them, as their users call them, against the demo model; and against one
whose weights say chosen texts, in every format of calls and in sessions of agents.

    python bench/clients.py [--venv FOLDER] [--client NAME] [--quick] [--out FILE]

Makes environments for the clients (without torch), starts `expertly serve` on the demo model in float32 with a chat
template that knows tools, and runs each client's list: the openai and anthropic packages, openai-agents, pydantic-ai,
langchain-openai, instructor, litellm and lm-eval's local-completions. What is checked is what a user of the client
sees. All but lm-eval also get a call and the answer to its result in the format of every family of chat templates
(tests/model/formats.py), which a tiny model writes; two packages hold a session of an agent with it: a long prompt,
tools, thoughts, several turns, each of which reads only what is new. `--quick`, as CI has it: without the last two,
which take more than a minute to install (1.6 each beside others' work, when the first five took 0.6 together and
instructor 0.7).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

LIGHT, ALONE, HEAVY = "light", "alone", "heavy"  # the environments, and what is in each
NEEDS = {
    LIGHT: (
        "openai==3.57.0",
        "anthropic==2.14.0",
        "openai-agents==0.24.0",
        "pydantic-ai-slim[openai]==2.68.0",
        "langchain-openai==1.7.4",
    ),
    ALONE: ("instructor==1.17.0",),  # beside others pip takes openai 1.109, and old ones of the rest
    HEAVY: ("litellm==1.110.2", "lm-eval[api]==0.4.13", "transformers==5.23.0", "numpy"),
}
"""A version each: what clients change later fails no CI."""
CLIENTS = dict.fromkeys(("openai", "anthropic", "openai-agents", "pydantic-ai", "langchain-openai"), LIGHT)
CLIENTS |= {"instructor": ALONE, "litellm": HEAVY, "lm-eval": HEAVY}
TEMPLATE = (
    "{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }} {% endfor %}{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY, "strict": True}}
HELLO = [{"role": "user", "content": "Tell me of the sea."}]
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]

LOOKS: dict[str, Any] = {"reasoning": "Far.", "calls": [("weather", {"city": "Oslo"})]}
TALK = {"call": LOOKS, "answer": {"content": "It rains."}}  # what the scripted model writes, by the word for it
SESSION: dict[str, dict[str, Any]] = {
    "read": {"reasoning": "I must see it.", "content": "I read it.", "calls": [("Read", {"path": "/src/add.py"})]},
    "look": {"calls": [("Grep", {"pattern": r"def \w+\("}), ("Bash", {"command": "pytest -q 2>&1 | tail"})]},
    "edit": {"reasoning": "A sign.", "calls": [("Edit", {"old": "    return a - b\n", "new": "    return a + b\n"})]},
    "done": {"content": "The test passes."},
}
RESULTS = {
    "Read": "def add(a, b):\n    return a - b\n@qwen3 look@",
    "Grep": "1:def add(",
    "Bash": "1 failed @qwen3 edit@",
}
RESULTS["Edit"] = "written @qwen3 done@"
SYSTEM = "You are an agent that mends programs. " + "Look before you change anything, and say what you found. " * 150
TASK = "<system-reminder>\nToday is Monday.\n</system-reminder>\nMend the test. @qwen3 read@"

Check = tuple[str, Callable[[], Any]]
Loop = Callable[[str, str], Any]
"""A question that a tool answers, of a server's URL and what the trigger words begin with; true where all is right."""


def parameters_of(name: str) -> dict[str, Any]:
    """The schema of one of the session's tools."""
    calls = (call for turn in SESSION.values() for call in turn.get("calls", ()))
    keys = list(dict(calls)[name])
    return {"type": "object", "properties": {key: {"type": "string"} for key in keys}, "required": keys}


# -- the lists, each run by the clients' own Python ------------------------------------------------------------------


def is_refused(error: type[Exception], ask: Callable[..., Any], **more: Any) -> bool:
    try:
        ask(**more)
    except error:
        return True
    return False


def openai_checks(url: str) -> list[Check]:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chat: Any = lambda **more: client.chat.completions.create(  # noqa: E731
        **{"model": "demo", "messages": HELLO, "max_tokens": 12, "temperature": 0} | more
    )

    def streamed() -> bool:
        chunks = list(chat(stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        return text == chat().choices[0].message.content and chunks[-1].usage.completion_tokens > 0

    def call(**more: Any) -> Any:
        return chat(tools=[TOOL], max_tokens=60, **more).choices[0].message.tool_calls[0].function

    def response_stream() -> bool:
        wish: Any = {"format": {"type": "json_schema", "name": "place", "schema": CITY}}
        with client.responses.stream(model="demo", input="Where?", text=wish, temperature=0) as stream:
            parts = [event.delta for event in stream if event.type == "response.output_text.delta"]
            return "".join(parts) == stream.get_final_response().output_text != ""

    return [
        ("models", lambda: client.models.list().data[0].id == "demo"),
        ("chat", lambda: chat().choices[0].message.content),
        ("a stream with its usage", streamed),
        (
            "completions, several prompts",
            lambda: len(client.completions.create(model="demo", prompt=["a", "b"]).choices) == 2,
        ),
        ("logprobs", lambda: len(chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content[0].top_logprobs) == 2),
        ("top_k, min_p, unknown fields", lambda: chat(extra_body={"top_k": 1, "min_p": 0.1, "colour": 2}).id),
        ("json_object", lambda: chat(response_format={"type": "json_object"}).choices[0].message.content[0] == "{"),
        (
            "json_schema",
            lambda: json.loads(chat(response_format=FORMAT, max_tokens=60).choices[0].message.content)["city"],
        ),
        ("a tool that must be called", lambda: json.loads(call(tool_choice="required").arguments)["city"]),
        ("responses", lambda: client.responses.create(model="demo", input="Hello", max_output_tokens=8).output_text),
        ("responses, streamed", response_stream),
        ("what cannot be had is an error", lambda: is_refused(openai.BadRequestError, chat, messages=PICTURE)),
    ]


def openai_loop(url: str, name: str) -> Any:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    said: list[Any] = [{"role": "user", "content": f"Oslo? @{name} call@"}]
    calls: dict[int, Any] = {}
    for chunk in client.chat.completions.create(model="demo", messages=said, tools=[TOOL], stream=True):  # type: ignore
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.id:
                calls[call.index] = call
            else:
                calls[call.index].function.arguments += call.function.arguments
    (call,) = calls.values()
    result = {"role": "tool", "tool_call_id": call.id, "content": f"rain @{name} answer@"}
    said += [{"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude={"index"})]}, result]
    answer = client.chat.completions.create(model="demo", messages=said, tools=[TOOL])  # type: ignore[list-item]
    return (
        json.loads(call.function.arguments) == {"city": "Oslo"}
        and answer.choices[0].message.content.strip() == "It rains."
    )


def anthropic_checks(url: str) -> list[Check]:
    import anthropic
    from pydantic import BaseModel

    class Place(BaseModel):
        city: Literal["Oslo", "Rome"]

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 12, "extra_body": {"temperature": 0}}
    ask: Any = lambda **more: client.messages.create(**(asked | more))  # noqa: E731
    tools = [{"name": "weather", "description": "of a city", "input_schema": CITY}]
    tools += [{"type": "web_search_20250305", "name": "web_search"}]
    forced = {"tools": tools, "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 60}
    picture = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]

    def streamed() -> bool:
        with client.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
        return text == ask().content[0].text and stream.get_final_message().usage.output_tokens == 12

    async def later() -> Any:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none").messages.stream(**asked) as stream:
            return (await stream.get_final_message()).stop_reason == "max_tokens"

    return [
        ("models", lambda: client.models.list().data[0].id == "demo"),
        ("a message", lambda: ask().content[0].text),
        ("a stream with its usage", streamed),
        ("a stream of the asynchronous client", lambda: asyncio.run(later())),
        ("count_tokens", lambda: client.messages.count_tokens(model="demo", messages=HELLO).input_tokens > 3),
        ("a tool that must be called", lambda: ask(**forced).content[-1].input["city"] in ("Oslo", "Rome")),
        ("parse", lambda: client.messages.parse(**asked | {"max_tokens": 60}, output_format=Place).parsed_output.city),
        ("what cannot be had is an error", lambda: is_refused(anthropic.BadRequestError, ask, messages=picture)),
        ("another model is an error", lambda: is_refused(anthropic.NotFoundError, ask, model="claude")),
    ]


def anthropic_loop(url: str, name: str) -> Any:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    said: list[Any] = [{"role": "user", "content": f"Oslo? @{name} call@"}]
    asked: Any = {"model": "demo", "max_tokens": 200, "messages": said}
    asked["tools"] = [{"name": "weather", "input_schema": CITY}]
    with client.messages.stream(**asked) as stream:
        call = stream.get_final_message()
    result = {"type": "tool_result", "tool_use_id": call.content[-1].id, "content": f"rain @{name} answer@"}
    said += [{"role": "assistant", "content": call.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**asked)
    return call.content[-1].input == {"city": "Oslo"} and answer.content[-1].text.strip() == "It rains."


def claude_code_session(url: str) -> bool:
    """As it sends its requests: each brings all that was said, and the model reads only what is new."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    kept = {"cache_control": {"type": "ephemeral"}}
    asked: dict[str, Any] = {
        "model": "demo",
        "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": SYSTEM, **kept}],
        "tools": [{"name": name, "description": "a tool", "input_schema": parameters_of(name)} for name in RESULTS],
        "messages": [{"role": "user", "content": [{"type": "text", "text": TASK, **kept}]}],
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14"],
        "thinking": {"type": "enabled", "budget_tokens": 31999},
    }
    before = 0
    for turn in SESSION.values():
        counted = client.beta.messages.count_tokens(**asked).input_tokens
        with client.beta.messages.stream(**asked, max_tokens=32_000, metadata={"user_id": "a"}) as stream:
            events = list(stream)
            answer = stream.get_final_message()
        calls = [block for block in answer.content if block.type == "tool_use"]
        texts = {block.type: getattr(block, block.type) for block in answer.content if block.type != "tool_use"}
        assert [(call.name, call.input) for call in calls] == turn.get("calls", []), calls
        assert (texts.get("thinking", "").strip(), texts.get("text", "").strip()) == (
            turn.get("reasoning", ""),
            turn.get("content", ""),
        )
        assert answer.stop_reason == ("tool_use" if calls else "end_turn")
        assert not calls or sum(event.type == "input_json" for event in events) > len(calls), "they come as written"
        assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == counted
        assert answer.usage.cache_read_input_tokens > before - 32, "all but a page of the turn before is kept"
        before = counted
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULTS[call.name]} for call in calls]
        asked["messages"] += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    return before > 2000


def instructor_checks(url: str) -> list[Check]:
    import instructor
    import openai
    from pydantic import BaseModel

    class Place(BaseModel):
        city: Literal["Oslo", "Rome"]

    raw = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "response_model": Place, "max_tokens": 60}
    asked |= {"temperature": 0, "max_retries": 0}

    def made(mode: str) -> Any:
        client = instructor.from_openai(raw, mode=instructor.Mode[mode])
        return client.chat.completions.create(**asked).city in ("Oslo", "Rome")

    return [(f"mode {mode}", lambda mode=mode: made(mode)) for mode in ("TOOLS", "JSON_SCHEMA")]


def instructor_loop(url: str, name: str) -> Any:
    """It forces its calls."""
    import instructor
    import openai
    from pydantic import BaseModel

    class weather(BaseModel):
        city: Literal["Oslo", "Rome"]

    raw = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    ask = instructor.from_openai(raw, mode=instructor.Mode.TOOLS).chat.completions.create
    said: Any = [{"role": "user", "content": f"Oslo? @{name} call@"}]
    asked: Any = {"model": "demo", "messages": said, "response_model": weather, "max_retries": 0}
    return ask(**asked).city in ("Oslo", "Rome")


def openai_agents_checks(url: str) -> list[Check]:
    import agents
    import openai
    from pydantic import BaseModel

    class Place(BaseModel):
        city: Literal["Oslo", "Rome"]

    agents.set_tracing_disabled(True)
    models = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}

    @agents.function_tool
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """Of a city."""
        return f"rain in {city}"

    def agent(kind: str, max_tokens: int, **more: Any) -> Any:
        settings = agents.ModelSettings(temperature=0, max_tokens=max_tokens, tool_choice=more.pop("choice", None))
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)  # for one event loop
        model = models[kind](model="demo", openai_client=client)
        return agents.Agent(name="demo", instructions="Be brief", model=model, model_settings=settings, **more)

    def run(kind: str, max_tokens: int = 60, **more: Any) -> Any:
        return asyncio.run(agents.Runner.run(agent(kind, max_tokens, **more), "Where?")).final_output

    async def streamed(kind: str) -> Any:
        result = agents.Runner.run_streamed(agent(kind, 60, output_type=Place), "Where?")  # its answer must end
        names = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
        return "response.output_text.delta" in names and result.final_output.city

    calling: dict[str, Any] = {"tools": [weather], "choice": "required", "tool_use_behavior": "stop_on_first_tool"}
    checks: list[Check] = [("an answer, chat", lambda: run("chat", 12))]
    cut: Any = {"kind": "responses", "max_tokens": 12}
    checks.append(("a cut answer, responses", lambda: is_refused(agents.ModelBehaviorError, run, **cut)))
    for kind in models:
        checks.append((f"a stream, {kind}", lambda kind=kind: asyncio.run(streamed(kind))))
        checks.append((f"a tool, {kind}", lambda kind=kind: run(kind, **calling).startswith("rain in ")))
        checks.append((f"output_type, {kind}", lambda kind=kind: run(kind, output_type=Place).city))
    return checks


def openai_agents_loop(url: str, name: str) -> Any:
    result = openai_agents_run(url, "chat", {"weather": f"rain @{name} answer@"}, f"Oslo? @{name} call@")
    return result.final_output.strip() == "It rains." and calls_of(result) == [("weather", {"city": "Oslo"})]


def openai_agents_run(url: str, kind: str, results: dict[str, str], task: str, instructions: str = "Be brief") -> Any:
    """An agent with tools that give `results`, streamed to its end."""
    import agents
    import openai

    agents.set_tracing_disabled(True)
    models = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}

    def tool(name: str) -> Any:
        async def used(context: Any, arguments: str) -> str:
            return results[name]

        parameters = CITY if name == "weather" else parameters_of(name)
        return agents.FunctionTool(name, "a tool", parameters, used, strict_json_schema=False)

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            model = models[kind](model="demo", openai_client=client)
            settings = agents.ModelSettings(include_usage=True)
            tools = [tool(name) for name in results]
            agent = agents.Agent("demo", instructions=instructions, model=model, tools=tools, model_settings=settings)
            result = agents.Runner.run_streamed(agent, task)
            async for _ in result.stream_events():
                pass
            return result

    return asyncio.run(run())


def calls_of(result: Any) -> list[tuple[str, Any]]:
    items = [item.raw_item for item in result.new_items if item.type == "tool_call_item"]
    return [(item.name, json.loads(item.arguments)) for item in items]


def openai_agents_session(url: str, kind: str) -> bool:
    """Each turn reads only what is new."""
    result = openai_agents_run(url, kind, RESULTS, TASK, SYSTEM)
    assert calls_of(result) == [call for turn in SESSION.values() for call in turn.get("calls", ())], calls_of(result)
    assert result.final_output == SESSION["done"]["content"], result.final_output
    usages = [response.usage for response in result.raw_responses]
    kept = [usage.input_tokens_details.cached_tokens for usage in usages]
    assert all(now > before.input_tokens - 32 for now, before in zip(kept[1:], usages, strict=False)), kept
    return len(usages) == len(SESSION) and kept[-1] > 2000


def pydantic_ai_checks(url: str) -> list[Check]:
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Place(BaseModel):
        city: Literal["Oslo", "Rome"]

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    models = {"chat": OpenAIChatModel("demo", provider=provider)}
    models["responses"] = OpenAIResponsesModel("demo", provider=provider)

    def run(kind: str, max_tokens: int = 60, **more: Any) -> Any:
        settings: Any = {"max_tokens": max_tokens, "temperature": 0}
        return Agent(models[kind], model_settings=settings, **more).run_sync("Where?").output

    async def streamed(kind: str) -> Any:
        settings: Any = {"max_tokens": 12, "temperature": 0}
        async with Agent(models[kind], model_settings=settings).run_stream("Where?") as result:
            return "".join([text async for text in result.stream_text(delta=True)])

    checks: list[Check] = []
    for kind in models:
        checks.append((f"an answer, {kind}", lambda kind=kind: run(kind, 12)))
        checks.append((f"a stream, {kind}", lambda kind=kind: asyncio.run(streamed(kind))))
        checks.append((f"NativeOutput, {kind}", lambda kind=kind: run(kind, output_type=NativeOutput(Place)).city))
        checks.append((f"ToolOutput, {kind}", lambda kind=kind: run(kind, output_type=ToolOutput(Place)).city))
    return checks


def pydantic_ai_loop(url: str, name: str) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    cities = []

    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """Of a city."""
        cities.append(city)
        return f"rain @{name} answer@"

    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    answer = Agent(model, tools=[weather]).run_sync(f"Oslo? @{name} call@").output
    return (cities, answer.strip()) == (["Oslo"], "It rains.")


def litellm_checks(url: str) -> list[Check]:
    import litellm

    asked = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 12, "temperature": 0, "max_retries": 0}
    chat: Any = lambda **more: litellm.completion(  # noqa: E731
        **{"model": "openai/demo", "messages": HELLO} | asked | more
    )
    call: Any = lambda: chat(tools=[TOOL], tool_choice="required", max_tokens=60)  # noqa: E731

    return [
        ("chat", lambda: chat().choices[0].message.content),
        ("a stream", lambda: "".join(c.choices[0].delta.content or "" for c in chat(stream=True))),
        ("reasoning_effort", lambda: chat(reasoning_effort="low", allowed_openai_params=["reasoning_effort"]).id),
        (
            "json_schema",
            lambda: json.loads(chat(response_format=FORMAT, max_tokens=60).choices[0].message.content)["city"],
        ),
        ("a tool that must be called", lambda: call().choices[0].message.tool_calls[0].function.name == "weather"),
        (
            "text completion",
            lambda: litellm.text_completion(model="text-completion-openai/demo", prompt="a", **asked).id,
        ),
        (
            "responses",
            lambda: (
                litellm.responses(
                    max_output_tokens=8, model="openai/demo", input="Hello", api_base=f"{url}/v1", api_key="none"
                ).id
            ),
        ),
        (
            "what cannot be had is its BadRequestError",
            lambda: is_refused(litellm.exceptions.BadRequestError, chat, messages=PICTURE),
        ),
    ]


def litellm_loop(url: str, name: str) -> Any:
    import litellm

    said: list[Any] = [{"role": "user", "content": f"Oslo? @{name} call@"}]
    asked: Any = {"model": "openai/demo", "api_base": f"{url}/v1", "api_key": "none", "tools": [TOOL]}
    whole = litellm.stream_chunk_builder(list(litellm.completion(messages=said, stream=True, **asked)))
    (call,) = whole.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": f"rain @{name} answer@"}
    answer = litellm.completion(messages=[*said, whole.choices[0].message, result], **asked)
    return (
        json.loads(call.function.arguments) == {"city": "Oslo"}
        and answer.choices[0].message.content.strip() == "It rains."
    )


def langchain_checks(url: str) -> list[Check]:
    from langchain_openai import ChatOpenAI, OpenAI

    told: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "model": "demo", "max_retries": 0}
    chat = ChatOpenAI(**told, temperature=0, max_tokens=60)
    tools = chat.bind_tools([TOOL], tool_choice="weather")
    short = ChatOpenAI(**told, temperature=0, max_tokens=8)
    schema = {"title": "place", "description": "a city", **CITY}
    return [
        ("invoke", lambda: short.invoke("Hello").content),
        ("a conversation", lambda: short.invoke([("system", "Be brief"), ("human", "Hello")]).content),
        ("stream", lambda: "".join(chunk.content for chunk in short.stream("Hello")) == short.invoke("Hello").content),
        ("batch", lambda: len(short.batch(["a", "b", "c"])) == 3),
        ("usage", lambda: short.invoke("Hello").usage_metadata["output_tokens"] == 8),
        ("bind_tools", lambda: tools.invoke("Oslo?").tool_calls[0]["args"]["city"]),
        ("with_structured_output, json_schema", lambda: chat.with_structured_output(schema).invoke("Where?")["city"]),
        (
            "with_structured_output, function_calling",
            lambda: chat.with_structured_output(schema, method="function_calling").invoke("Where?")["city"],
        ),
        ("completions", lambda: OpenAI(**told, max_tokens=8).invoke("Once upon")),
        ("responses", lambda: ChatOpenAI(**told, max_tokens=16, use_responses_api=True).invoke("Hello").text),
    ]


def langchain_loop(url: str, name: str) -> Any:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="demo", max_retries=0).bind_tools([TOOL])  # type: ignore
    said: list[Any] = [("human", f"Oslo? @{name} call@")]
    first, *rest = chat.stream(said)
    whole = sum(rest, first)
    (call,) = whole.tool_calls
    result = {"role": "tool", "tool_call_id": call["id"], "content": f"rain @{name} answer@"}
    return (call["args"], chat.invoke([*said, whole, result]).content.strip()) == ({"city": "Oslo"}, "It rains.")


def lm_eval_checks(url: str) -> list[Check]:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    from_text: dict[str, Any] = {"model": "demo", "base_url": f"{url}/v1/completions", "max_length": 512}
    folder = os.environ["EXPERTLY_DEMO"]
    # As text (`tokenized_requests=False`) and as tokens of the model's own tokenizer, both of which users do.
    models = {
        "text": lambda: LocalCompletionsAPI(**from_text, tokenizer=folder, tokenized_requests=False),
        "tokens": lambda: LocalCompletionsAPI(**from_text, tokenizer=folder, tokenized_requests=True, batch_size=2),
    }

    def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        return [Instance(request_type=kind, doc={}, arguments=one, idx=n) for n, one in enumerate(arguments)]

    def generated(model: Any) -> Any:
        until: dict[str, Any] = {"until": ["\n"], "max_gen_toks": 8, "temperature": 0}
        texts = model.generate_until(instances("generate_until", [("The sea", until), ("A king", until)]))
        return len(texts) == 2 and all(texts)

    def likely(model: Any) -> Any:
        pairs = [("The old man went to the", " sea"), ("The old man went to the", " xylophone")]
        (sea, _), (xylophone, _) = model.loglikelihood(instances("loglikelihood", pairs))
        return xylophone < sea < 0

    def chatted() -> Any:
        model = LocalChatCompletion(model="demo", base_url=f"{url}/v1/chat/completions", tokenizer_backend=None)
        said = json.dumps(HELLO)
        until: dict[str, Any] = {"until": ["\n\n"], "max_gen_toks": 8, "temperature": 0}
        from lm_eval.models.api_models import JsonChatStr

        return model.generate_until(instances("generate_until", [(JsonChatStr(said), until)]))[0]

    checks: list[Check] = []
    for name, make in models.items():
        checks.append((f"generate_until, {name}", lambda make=make: generated(make())))
        checks.append((f"loglikelihood, {name}", lambda make=make: likely(make())))
    return [*checks, ("generate_until by chat", chatted)]


LISTS = (openai_checks, anthropic_checks, openai_agents_checks, pydantic_ai_checks, langchain_checks)
LISTS += (instructor_checks, litellm_checks, lm_eval_checks)
CHECKS = dict(zip(CLIENTS, LISTS, strict=True))
LOOPS: tuple[Loop, ...] = (openai_loop, anthropic_loop, openai_agents_loop, pydantic_ai_loop, langchain_loop)
LOOPS += (instructor_loop, litellm_loop)
SESSIONS: dict[str, dict[str, Callable[[str], Any]]] = {
    "anthropic": {"a session, as Claude Code's": claude_code_session},
    "openai-agents": {
        f"a session, {kind}": lambda url, kind=kind: openai_agents_session(url, kind) for kind in ("chat", "responses")
    },
}


def run_checks(client: str, url: str, scripted: dict[str, str]) -> None:
    """In the clients' Python: print what passed, as JSON. `scripted`: the URL of each format's server."""
    results = []
    checks = CHECKS[client](url)
    if loop := dict(zip(CLIENTS, LOOPS, strict=False)).get(client):
        checks += [(f"a call, {name}", lambda at=at, name=name: loop(at, name)) for name, at in scripted.items()]
    checks += [(name, lambda run=run: run(scripted["qwen3"])) for name, run in SESSIONS.get(client, {}).items()]
    for name, check in checks:
        try:
            passed, note = bool(check()), ""
        except Exception as error:  # whatever a client raises is what its user would see
            passed, note = False, f"{type(error).__name__}: {error}"[:300]
            traceback.print_exc()
        results.append({"check": name, "passed": passed, "note": note})
    print(json.dumps(results))


# -- the server, and the environment ---------------------------------------------------------------------------------


def environment(folder: Path, needs: Sequence[str]) -> Path:
    """Its Python. Made once; the clients are installed where one is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", *needs], check=True, stdout=sys.stderr)
    return python


@contextmanager
def scripted_servers(demo: Path) -> Iterator[dict[str, str]]:
    """Of one model that writes TALK in each format and SESSION in Qwen's, a server for each format: their URLs."""
    from common import ROOT

    import expertly

    sys.path.insert(0, str(ROOT))
    import torch
    from transformers import AutoTokenizer

    from tests.model.formats import FAMILIES, scripts_of
    from tests.scripts import make_scripted
    from tests.serve.conftest import room_for, served

    scripts = scripts_of(FAMILIES, TALK) + scripts_of(
        [family for family in FAMILIES if family.name == "qwen3"], SESSION
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        made = make_scripted(Path(folder) / "model", AutoTokenizer.from_pretrained(demo), scripts)
        torch.set_num_threads(1)
        model, tokenizer = expertly.load(str(made), memory="25%", dtype="float32", device="cpu")
        opened.callback(expertly.unload, model)
        gc.freeze()  # continuous batching collects garbage when it begins and ends
        urls = {}
        for family in FAMILIES:
            room = room_for(8192 if family.name == "qwen3" else 1024, 4)
            urls[family.name] = opened.enter_context(served(model, tokenizer, room, family.template)).url
        yield urls


def versions(python: Path, needs: Sequence[str]) -> dict[str, str]:
    names = [name.partition("[")[0].partition("=")[0] for name in needs]
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    found: dict[str, str] = json.loads(subprocess.check_output([str(python), "-c", code]))
    return found


def main() -> None:
    from common import options, print_report

    from expertly.data import demo_folder

    venv = f"{tempfile.gettempdir()}/clients-venv"
    args = options(__doc__, venv=venv, client=(None, *CLIENTS), quick=False, out=None)
    asked = [args.client] if args.client else [name for name in CLIENTS if not args.quick or CLIENTS[name] != HEAVY]
    pythons = {kind: environment(Path(args.venv) / kind, NEEDS[kind]) for kind in {CLIENTS[name] for name in asked}}
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(TEMPLATE)
        template.flush()
        command = [sys.executable, "-m", "expertly", "serve", "--memory", "50%", "--dtype", "float32", "--port", "0"]
        command += ["--json", "--served-model-name", "demo", "--chat-template", template.name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = json.loads(server.stdout.readline())["url"]
                with scripted_servers(demo_folder()) as urls:
                    results = {name: checked(pythons[CLIENTS[name]], name, url, urls, demo_folder()) for name in asked}
            finally:
                server.terminate()
    rows = [{"client": name, **one} for name, checks in results.items() for one in checks]
    known = {name: number for kind in pythons for name, number in versions(pythons[kind], NEEDS[kind]).items()}
    print_report("clients", rows, {"clients": known}, args.out)
    sys.exit(not all(row["passed"] for row in rows))


def checked(python: Path, client: str, url: str, scripted: dict[str, str], demo: Path) -> list[dict[str, Any]]:
    command = [str(python), str(Path(__file__).resolve()), "--checks", client, url, json.dumps(scripted)]
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own |= {"EXPERTLY_DEMO": str(demo), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=own, timeout=500, check=False)
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("["):
        return [{"check": "it starts", "passed": False, "note": f"exit {done.returncode}"}]
    found: list[dict[str, Any]] = json.loads(lines[-1])
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--checks"]:
        run_checks(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
    else:
        main()
