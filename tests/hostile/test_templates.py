"""Chat templates rendered in a process of little memory and time: bombs end in one line, templates as transformers has
them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from expertly.core.errors import ConfigError
from expertly.data import demo_folder
from expertly.model.prompts import tokens_of
from expertly.model.templates import Renderer
from tests.waiting import until

CPU_S = 0.1
MIB = 1 << 20

LOOP = "{% for i in range(99) %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}"
BOMBS = {
    "~": "{% set s = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set s.x = s.x ~ s.x %}{% endfor %}{{ s.x }}",
    "* of a text": "{{ 'a' * 10000000000 }}",
    "** of numbers": "{{ (7 ** 10000000) ** 1000 }}",
    "a width by %": "{{ '%9999999999d' % 1 }}",
    "the filter format": "{{ '%2000000000d' | format(1) }}",
    "ljust": "{{ 'a'.ljust(9999999999) }}",
    "expandtabs": "{{ '\t\t'.expandtabs(2000000000) }}",
    "join": "{{ ('a' * 100000).join(range(99999) | map('string')) }}",
    "indent": "{{ ('a\n' * 100000) | indent(100000) }}",
    "wordwrap": "{{ ('a ' * 100000) | wordwrap(1, wrapstring='b' * 100000) }}",
    "tojson": "{{ [0] | tojson(indent=9999999999) }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "loops": LOOPS + "{% set c = a * b %}{% endfor %}{% endfor %}",
    "sum of loops": "{{ range(99999) | map('string') | map('center', 99999) | join }}",
    "a recursive loop": "{% for a in [1] recursive %}{{ loop([a]) }}{% endfor %}",
    "cycler": "{% set c = cycler(*range(99999)) %}" + LOOPS + "{{ c.next() }}{% endfor %}{% endfor %}",
    "sort": "{{ (range(99999) | list * 200) | sort | sort(reverse=true) | length }}",
    "strftime": "{{ strftime_now('%Y' * 50000000) }}",
    "a deep expression": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "a constant that is folded": "{% set x = ('a' * 100000) * 1000000 %}",
}
"""Each breaks a limit, or jinja2's own; none is to end well."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_folder())


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    with Renderer(CPU_S, seconds=20, nbytes=64 * MIB) as made:
        yield made


def peak_nbytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_in_one_line(name: str, tokenizer: Any, renderer: Renderer) -> None:
    begin = time.process_time()
    with pytest.raises(ConfigError, match=r"^messages: the model's chat template ") as caught:
        renderer.render(tokenizer, [{"role": "user", "content": "Hi"}], BOMBS[name], most=100_000)
    assert len(str(caught.value)) < 1200 and "\n" not in str(caught.value)
    assert time.process_time() - begin < 1, "this process did not work for it"
    if (pid := renderer.sandbox.pid) is not None:
        assert peak_nbytes(pid) < 120 * MIB
    assert renderer.render(tokenizer, [{"role": "user", "content": "Hi"}], "{{ messages[0].content }}") == "Hi"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('System role not supported') }}", "refuses them: System role not supported"),
        ("{{ raise_exception('two\nlines') }}", "refuses them: two lines"),
        ("{{ nothing.more }}", "refuses them: 'nothing' is undefined"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{% for %}", "refuses them: "),
        ("{% while %}", "unknown tag 'while'"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "did not end in 0.1 s"),
        ("{{ 'a' * 10000000000 }}", "takes more than 64 MiB"),
        ("{{ 'a' * 200000 }}", "makes 200000 characters of them; accepted: 100000"),
        ("{{ '\\ud800' }}", "it makes half of a surrogate pair"),
        ("{{ messages[0].content[:1] }}", "it makes half of a surrogate pair"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_is_said(template: str, sentence: str, tokenizer: Any, renderer: Renderer) -> None:
    with pytest.raises(ConfigError) as caught:
        renderer.render(tokenizer, [{"role": "user", "content": "\ud800Hi"}], template, most=100_000)
    assert str(caught.value).startswith("messages: the model's chat template ") and sentence in str(caught.value)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"ü": {}}}}}

TEMPLATES = {
    "loops": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "generation": "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "special tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}",
    "a date": "{{ strftime_now('%Y-%m-%d') }}",
    "None is dropped": "{{ messages[0].name is defined }}{{ messages | length }}",
    "other names of reasoning": "{{ messages[1].reasoning_content }}{{ messages[1].thinking }}",
    "characters": "{{ messages[0].content }}é漢🙂\u2028<&\"'>",
    "html is not escaped": "{{ '<' | tojson }}{{ '<' }}{{ messages[0].content | e }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_rendered_as_transformers_renders_it(name: str, tokenizer: Any, renderer: Renderer) -> None:
    messages = [
        {"role": "user", "content": "Hi <é🙂>", "name": None},
        {"role": "assistant", "content": "", "thinking": "hm"},
        {"role": "user", "content": "And?\n"},
    ]
    variables = {"enable_thinking": False, "number": 1.5, "nested": {"a": [1, None]}}
    day = datetime.now().day
    rendered = renderer.render(tokenizer, messages, TEMPLATES[name], [TOOL], variables)
    options = {"tokenize": False, "add_generation_prompt": True, "tools": [TOOL], "chat_template": TEMPLATES[name]}
    expected = tokenizer.apply_chat_template(messages, **options, **variables)
    assert rendered == expected or day != datetime.now().day


def test_a_command_uses_it(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}!"
    try:
        assert tokens_of(tokenizer, [{"role": "user", "content": "Hi"}]) == tokenizer.encode("Hi!")
        tokenizer.chat_template = "{{ raise_exception('no') }}"
        with pytest.raises(ConfigError, match="chat template refuses them: no"):
            tokens_of(tokenizer, [{"role": "user", "content": "Hi"}])
    finally:
        tokenizer.chat_template = None


def test_the_process_has_no_files_and_does_not_outlive_its_parent(tokenizer: Any) -> None:
    """Not even one that was killed: a fork makes it, tells its number and its files, and dies."""
    reader, writer = os.pipe()
    held = os.open(__file__, os.O_RDONLY)
    os.set_inheritable(held, True)
    parent = os.fork()
    if parent == 0:
        renderer = Renderer()
        renderer.render(tokenizer, [], "a")
        pid = renderer.sandbox.pid
        names = sorted(os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd"))
        os.write(writer, " ".join((str(pid), *names)).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    pid, *names = os.read(reader, 4096).decode().split()
    for file in (reader, writer, held):
        os.close(file)
    assert [name.partition(":")[0] for name in names] == ["/dev/null", "/dev/null", "socket"]
    command = Path(f"/proc/{pid}/cmdline")
    until(lambda: not command.exists() or not command.read_bytes())


def test_what_ends_the_process_while_it_waits_ends_no_conversation(tokenizer: Any, renderer: Renderer) -> None:
    assert renderer.render(tokenizer, [], "a") == "a"
    pid = renderer.sandbox.pid
    assert pid is not None
    assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000", "it goes first where memory runs out"
    os.kill(pid, signal.SIGKILL)
    until(lambda: renderer.sandbox.pid is None)
    assert renderer.render(tokenizer, [], "b") == "b"


@pytest.mark.parametrize("length", [2, 4 * MIB], ids=["short", "more than a socket holds"])
def test_a_process_that_stands_still_ends_in_its_time(tokenizer: Any, length: int) -> None:
    """Processor time alone would not end it; nor may a conversation wait for it to be read."""
    with Renderer(seconds=2.0) as renderer:
        assert renderer.render(tokenizer, [], "a") == "a"
        assert renderer.sandbox.pid is not None
        os.kill(renderer.sandbox.pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(ConfigError, match="did not end in 2 s"):
            renderer.render(tokenizer, [{"role": "user", "content": "a" * length}], "{{ messages[0].content }}")
        assert time.monotonic() - begin < 20
        assert renderer.render(tokenizer, [], "b") == "b"
