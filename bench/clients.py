"""Can every client talk to the server? Eight of them, as their users call them, against the demo model.

    python bench/clients.py [--venv FOLDER] [--client NAME] [--quick] [--out FILE]

Makes environments for the clients (without torch), starts `expertly serve` on the demo model in float32 with a chat
template that knows tools, and runs each client's list: the openai and anthropic packages, openai-agents, pydantic-ai,
langchain-openai, instructor, litellm and lm-eval's local-completions. What is checked is what a user of the client
sees. `--quick`, as CI has it: without the last two, which take more than a minute to install (1.6 each beside others'
work, when the first five took 0.6 together and instructor 0.7).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
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

Check = tuple[str, Callable[[], Any]]


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
        ("top_k, min_p, unknown fields", lambda: chat(extra_body={"top_k": 1, "min_p": 0.1, "mirostat": 2}).id),
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

    def session() -> bool:
        """The second turn reads only what is new."""
        system = [{"type": "text", "text": "Be brief. " * 60, "cache_control": {"type": "ephemeral"}}]
        more = forced | {"system": system, "metadata": {"user_id": "a"}, "thinking": {"type": "disabled"}}
        call = ask(**more)
        result = {"type": "tool_result", "tool_use_id": call.content[-1].id, "content": "rain"}
        said = [*HELLO, {"role": "assistant", "content": call.content}, {"role": "user", "content": [result]}]
        usage = ask(**(more | {"messages": said})).usage
        return call.stop_reason == "tool_use" and usage.cache_read_input_tokens > usage.input_tokens

    return [
        ("models", lambda: client.models.list().data[0].id == "demo"),
        ("a message", lambda: ask().content[0].text),
        ("a stream with its usage", streamed),
        ("a stream of the asynchronous client", lambda: asyncio.run(later())),
        ("count_tokens", lambda: client.messages.count_tokens(model="demo", messages=HELLO).input_tokens > 3),
        ("a tool that must be called", lambda: ask(**forced).content[-1].input["city"] in ("Oslo", "Rome")),
        ("parse", lambda: client.messages.parse(**asked | {"max_tokens": 60}, output_format=Place).parsed_output.city),
        ("a session with tools", session),
        ("what cannot be had is an error", lambda: is_refused(anthropic.BadRequestError, ask, messages=picture)),
        ("another model is an error", lambda: is_refused(anthropic.NotFoundError, ask, model="claude")),
    ]


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


def run_checks(client: str, url: str) -> None:
    """In the clients' Python: print what passed, as JSON."""
    results = []
    for name, check in CHECKS[client](url):
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
        command += ["--json", "--name", "demo", "--chat-template", template.name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = json.loads(server.stdout.readline())["url"]
                results = {name: checked(pythons[CLIENTS[name]], name, url, str(demo_folder())) for name in asked}
            finally:
                server.terminate()
    rows = [{"client": name, **one} for name, checks in results.items() for one in checks]
    known = {name: number for kind in pythons for name, number in versions(pythons[kind], NEEDS[kind]).items()}
    print_report("clients", rows, {"clients": known}, args.out)
    sys.exit(not all(row["passed"] for row in rows))


def checked(python: Path, client: str, url: str, demo: str) -> list[dict[str, Any]]:
    command = [str(python), str(Path(__file__).resolve()), "--checks", client, url]
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own |= {"EXPERTLY_DEMO": demo, "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=own, timeout=500, check=False)
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("["):
        return [{"check": "it starts", "passed": False, "note": f"exit {done.returncode}"}]
    found: list[dict[str, Any]] = json.loads(lines[-1])
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--checks"]:
        run_checks(sys.argv[2], sys.argv[3])
    else:
        main()
