"""Families of chat templates: what they add to a vocabulary, and how they write an answer that reasons and calls.

Each template has the structure of the published one, cut to what an answer is made of.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.scripts import Script

ARGUMENTS: dict[str, Any] = {
    "city": 'Oslo "the city"\n  {on the [fjord}, \\ Ås',
    "days": 3,
    "exact": True,
    "tags": ["a", {"b": None}],
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array"},
    },
    "required": ["city"],
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get-weather", "parameters": PARAMETERS}}
MESSAGES: dict[str, dict[str, Any]] = {
    "call": {"calls": [("get-weather", ARGUMENTS)]},
    "thinks": {"reasoning": "Oslo is far.", "calls": [("get-weather", ARGUMENTS)]},
    "two": {"calls": [("get-weather", ARGUMENTS), ("clock", {})]},
    "says": {"content": "I look.", "calls": [("clock", {})]},
    "answer": {"reasoning": "Hm.", "content": "It rains in Oslo."},
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class Family:
    """`answer`: what a template writes behind `begin` for a message. `special`: added tokens that are special there,
    `plain`: those that are not.
    """

    name: str
    tools: str
    begin: str
    answer: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()

    @property
    def template(self) -> str:
        calls = "((m.tool_calls or []) | map(attribute='function') | list)"
        answer = self.answer.replace("m.reasoning", "m.reasoning_content").replace("m.calls", calls)
        turn = "{% if m.role == 'assistant' %}" + self.begin + answer + "{% else %}{{ m.content }}\n{% endif %}"
        shown = "{% if tools %}" + self.tools + "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
        ending = "{% if add_generation_prompt %}" + self.begin + "{% endif %}"
        return shown + "{% for m in messages %}" + turn + "{% endfor %}" + ending

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.special, *self.plain)

    def written(self, **message: Any) -> str:
        """An answer with `reasoning`, `content` and `calls`, a name and arguments each."""
        environment = Environment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        message["calls"] = [{"name": name, "arguments": arguments} for name, arguments in message.get("calls", ())]
        return environment.from_string(self.answer).render(m={"reasoning": "", "content": "", **message})

    def tokenizer(self, tokenizer: Any, vocabulary: int) -> Any:
        """`tokenizer` with the family's added tokens in place of its last ones."""
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        model, least = state["model"], vocabulary - len(self.special) - len(self.plain)
        model["vocab"] = {word: token for word, token in model["vocab"].items() if token < least}
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [pair for pair in pairs if {*pair, "".join(pair)} <= model["vocab"].keys()]
        made = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token=tokenizer.eos_token
        )
        made.add_tokens([AddedToken(name, special=True, normalized=False) for name in self.special], True)
        made.add_tokens([AddedToken(name, special=False, normalized=False) for name in self.plain])
        return made


THINK = "{% if m.reasoning %}<think>\n{{ m.reasoning }}\n</think>\n\n{% endif %}{{ m.content }}"
EACH = "{% for call in m.calls %}"
VALUES = "{% for k, v in call.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
V31 = "<｜tool▁call▁begin｜>{{ call.name }}<｜tool▁sep｜>{{ call.arguments | tojson }}<｜tool▁call▁end｜>"
V3 = (
    "{{ '\n' if not loop.first }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.name }}\n```json\n"
    "{{ call.arguments | tojson }}\n```<｜tool▁call▁end｜>"
)
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KIMI = ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"]
GEMMA_MACRO = (
    "{% macro value(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is mapping %}{{ '{' }}"
    "{% for k, w in v.items() %}{{ ',' if not loop.first }}{{ k }}:{{ value(w) }}{% endfor %}{{ '}' }}"
    "{% elif v is iterable %}[{% for w in v %}{{ ',' if not loop.first }}{{ value(w) }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)


def dsml(section: str) -> str:
    invoke = (
        EACH + '<｜DSML｜invoke name="{{ call.name }}">\n' + VALUES + '<｜DSML｜parameter name="{{ k }}" '
        "string=\"{{ 'true' if v is string else 'false' }}\">" + VALUE + "</｜DSML｜parameter>\n{% endfor %}"
        "</｜DSML｜invoke>\n{% endfor %}"
    )
    return THINK + "{% if m.calls %}\n\n<｜DSML｜" + section + ">\n" + invoke + "</｜DSML｜" + section + ">{% endif %}"


FAMILIES = (
    Family(
        "gpt-oss",
        "<|start|>developer<|message|># Tools<|end|>",
        "<|start|>assistant",
        "{% if m.reasoning %}<|channel|>analysis<|message|>{{ m.reasoning }}<|end|><|start|>assistant{% endif %}"
        "{% if m.content and m.calls %}<|channel|>commentary<|message|>{{ m.content }}<|end|><|start|>assistant"
        "{% elif m.content %}<|channel|>final<|message|>{{ m.content }}{% endif %}"
        + EACH
        + "{{ '<|start|>assistant' if not loop.first }}<|channel|>commentary to=functions.{{ call.name }} "
        "<|constrain|>json<|message|>{{ call.arguments | tojson }}{{ '<|call|>' if not loop.last }}{% endfor %}",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
    ),
    Family(
        "qwen3",
        "# Tools, in <tools></tools>, <tool_call></tool_call>\n",
        "<|im_start|>assistant\n",
        THINK
        + EACH
        + '\n<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>'
        "{% endfor %}",
        ("<|im_start|>", "<|im_end|>"),
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    Family(
        "qwen3-coder",
        "# Tools\n<tool_call>\n<function=example>\n<parameter=a>\n",
        "<|im_start|>assistant\n",
        "{{ m.content }}"
        + EACH
        + "\n<tool_call>\n<function={{ call.name }}>\n"
        + VALUES
        + "<parameter={{ k }}>\n"
        + VALUE
        + "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
        ("<|im_start|>", "<|im_end|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    Family(
        "deepseek-v3",
        "## Tools\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json\n",
        "<｜Assistant｜>",
        "{{ m.content }}{% if m.calls %}<｜tool▁calls▁begin｜>"
        + EACH
        + V3
        + "{% endfor %}<｜tool▁calls▁end｜>{% endif %}",
        ("<｜User｜>", "<｜Assistant｜>"),
        DEEPSEEK,
    ),
    Family(
        "deepseek-v3.1",
        "## Tools\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>",
        "<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}",
        "{{ m.reasoning ~ '</think>' if m.reasoning }}{{ m.content }}{% if m.calls %}<｜tool▁calls▁begin｜>"
        + EACH
        + V31
        + "{% endfor %}<｜tool▁calls▁end｜>{% endif %}",
        ("<｜User｜>", "<｜Assistant｜>"),
        (*DEEPSEEK, "<think>", "</think>"),
    ),
    Family(
        "deepseek-v3.2",
        "<｜DSML｜function_calls>",
        "<｜Assistant｜>",
        dsml("function_calls"),
        ("<｜Assistant｜>",),
        ("｜DSML｜",),
    ),
    Family(
        "deepseek-v4",
        "<｜DSML｜tool_calls>",
        "<｜Assistant｜>",
        dsml("tool_calls"),
        ("<｜Assistant｜>",),
        ("｜DSML｜", "<think>", "</think>"),
    ),
    Family(
        "glm-4.6",
        "# Tools\n<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n",
        "<|assistant|>",
        "\n"
        + THINK
        + EACH
        + "\n<tool_call>{{ call.name }}\n"
        + VALUES
        + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
        + VALUE
        + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
        ("<|assistant|>", "<|observation|>"),
        (
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
    ),
    Family(
        "kimi-k2",
        "<|im_system|>tool_declare",
        "<|im_assistant|>assistant<|im_middle|>",
        "{{ m.content }}{% if m.calls %}<|tool_calls_section_begin|>"
        + EACH
        + "<|tool_call_begin|>functions.{{ call.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ call.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}",
        ("<|im_system|>", "<|im_assistant|>", "<|im_middle|>"),
        (*KIMI, "<|tool_calls_section_end|>"),
    ),
    Family(
        "minimax-m2",
        "# Tools\n<minimax:tool_call>\n",
        "]~b]ai\n",
        THINK
        + "{% if m.calls %}\n<minimax:tool_call>\n"
        + EACH
        + '<invoke name="{{ call.name }}">\n'
        + VALUES
        + '<parameter name="{{ k }}">'
        + VALUE
        + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}",
        ("]~b]", "[e~["),
        ("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
    ),
    Family(
        "gemma-4",
        "<|tool>declaration<tool|> <|tool_call>call:",
        "<|turn>model\n",
        GEMMA_MACRO
        + "{% if m.reasoning %}<|channel>thought\n{{ m.reasoning }}\n<channel|>{% endif %}{{ m.content }}"
        + EACH
        + "<|tool_call>call:{{ call.name }}{{ value(call.arguments) }}<tool_call|>{% endfor %}",
        ("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|tool_response>"),
    ),
    Family(
        "mistral",
        "[AVAILABLE_TOOLS][TOOL_CALLS][ARGS]",
        "[INST][/INST]",
        "{{ '[THINK]' ~ m.reasoning ~ '[/THINK]' if m.reasoning }}{{ m.content }}"
        + EACH
        + "[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}{% endfor %}",
        ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    ),
    Family(
        "mistral-nemo",
        "[AVAILABLE_TOOLS][TOOL_CALLS]",
        "[INST][/INST]",
        "{{ m.content }}{% if m.calls %}[TOOL_CALLS][" + EACH + "{{ ', ' if not loop.first }}"
        '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}, "id": "abcdefgh{{ loop.index }}"}'
        "{% endfor %}]{% endif %}",
        ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
    ),
    Family(
        "llama-3",
        "<|start_header_id|>ipython<|end_header_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "{{ m.content }}" + EACH + "{{ '; ' if not loop.first }}"
        '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}{% endfor %}',
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    ),
)


def scripts_of(families: Sequence[Family], messages: Mapping[str, dict[str, Any]] = MESSAGES) -> list[Script]:
    """What each family writes for each message, behind its name and the message's."""
    pairs = itertools.product(families, messages.items())
    return [
        Script(f"{family.name} {name}", family.written(**message), family.special, family.plain)
        for family, (name, message) in pairs
    ]
