"""The dashboard in a real browser: what it shows is what the server says, and the chat box chats."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.browser import Tab, browser, find_browser
from tests.serve.conftest import KEY, Serving, served

BROWSER = find_browser()
pytestmark = [pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine"), pytest.mark.slow]

READY = "document.querySelector('#status').textContent === 'ready'"
HAS_ANSWERED = "document.querySelector('#send').disabled === false"


@pytest.fixture(scope="module")
def window() -> Iterator[Tab]:
    assert BROWSER is not None
    with browser(BROWSER) as tab:
        yield tab


@pytest.fixture
def tab(window: Tab, serving: Serving) -> Iterator[Tab]:
    """The page of a server without a key, that has been told what it shows."""
    window.open(f"{serving.url}/")
    window.until(READY)
    window.problems.clear()
    yield window
    assert window.problems == [], "the page has bugs, or asked for what its policy forbids"
    assert {url for url in window.asked if url.startswith("http") and "127.0.0.1" not in url} == set()


CELLS = """(() => {
  const canvas = document.querySelector('#map'), pen = canvas.getContext('2d'), found = [];
  const sample = document.createElement('canvas').getContext('2d');
  sample.fillStyle = getComputedStyle(document.documentElement).getPropertyValue('--absent').trim();
  sample.fillRect(0, 0, 1, 1);
  const absent = [...sample.getImageData(0, 0, 1, 1).data].join();
  for (let y = 0; y < drawn.experts.layers.length; y++)
    found.push(drawn.experts.layers[y].segments_present.map((_, x) => {
      const color = pen.getImageData(LABEL + (x + 0.4) * drawn.cell, (y + 0.4) * drawn.row, 1, 1).data;
      return [...color].join() === absent ? 0 : 1;
    }));
  return found;
})()"""


def say(tab: Tab, text: str, temperature: str = "0", limit: str = "12") -> None:
    for name, value in (("temperature", temperature), ("limit", limit)):
        tab.run(f"document.querySelector('#{name}').value = {value}")
    tab.type("#ask", text)
    tab.click("#send")


def last_said(tab: Tab, who: str) -> str:
    text: str = tab.run(f"[...document.querySelectorAll('.said[data-who={who}]')].pop().textContent")
    return text


def test_the_map_shows_what_is_resident(tab: Tab, serving: Serving) -> None:
    serving.complete("The old man")
    layers = serving.assembled.view.experts()["layers"]
    expected = [[int(present > 0) for present in layer["segments_present"]] for layer in layers]
    assert 0 < sum(map(sum, expected)) < 12 * 32
    tab.until(f"JSON.stringify({CELLS}) === {json.dumps(json.dumps(expected, separators=(',', ':')))}")


def test_numbers_are_the_servers_and_change_when_it_answers(tab: Tab, serving: Serving) -> None:
    """Rates are of what happened since the page was opened."""
    assert shown(tab, "n-hits") == "-"
    view = serving.assembled.view
    before = view.state()
    serving.complete("The sea", 30)
    state = view.state()
    num_hits, *others = (state[name] - before[name] for name in ("hits", "partial_hits", "misses"))
    share = f"{100 * num_hits / (num_hits + sum(others)):.1f} %"
    tab.until(f"document.querySelector('#n-hits').textContent === '{share}'")
    tab.until("trend.some((look) => look.tokens > 0)")
    for name in ("running", "waiting"):
        tab.until(f"document.querySelector('#n-{name}').textContent === '0'")
    for name, key in (("MiBexperts", "experts_resident_bytes"), ("all experts, on disk:", "all_experts_bytes")):
        (mebibytes,) = re.findall(rf"{name} ([\d.]+) MiB", shown(tab, "memory"))
        assert float(mebibytes) == pytest.approx(state["memory"][key] / 2**20, abs=0.051)


def shown(tab: Tab, name: str) -> str:
    text: str = tab.run(f"document.querySelector('#{name}').textContent")
    return text


def test_the_chat_box_chats(tab: Tab, demo: tuple[Any, Any], serving: Serving) -> None:
    say(tab, "The old man and the sea")
    tab.until(f"{HAS_ANSWERED} && document.querySelectorAll('.said').length === 2")
    expected = serving.chat("The old man and the sea", 12).choices[0].message.content
    assert last_said(tab, "model") == expected
    assert "12 tokens" in tab.run("document.querySelector('#speed').textContent")
    say(tab, "And then?")
    tab.until(f"{HAS_ANSWERED} && document.querySelectorAll('.said').length === 4")
    said = [("user", "The old man and the sea"), ("assistant", expected), ("user", "And then?")]
    second = serving.chat("", 12, messages=[{"role": role, "content": text} for role, text in said])
    assert last_said(tab, "model") == second.choices[0].message.content, "it was told what had been said before"


def test_stop_frees_the_servers_place(tab: Tab, serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    told, may_go_on = serving.scheduler.sampler._tell, threading.Event()

    def first_alone(choices: Any) -> None:
        told(choices)
        may_go_on.wait(60)  # on the thread that computes: the answer outlasts the page's next look at the server

    monkeypatch.setattr(serving.scheduler.sampler, "_tell", first_alone)
    say(tab, "Write for long", limit="400")
    tab.until("[...document.querySelectorAll('.said[data-who=model]')].pop()?.textContent.length > 0")
    tab.until("document.querySelector('#n-running').textContent === '1'")
    assert len(serving.scheduler.running) == 1
    tab.click("#stop")
    tab.until(HAS_ANSWERED)
    assert "(stopped)" in tab.run("document.querySelector('#speed').textContent")
    tab.until("document.querySelector('#n-running').textContent === '0'")
    assert not serving.scheduler.running
    may_go_on.set()


def test_what_is_said_is_text_and_an_error_is_told(tab: Tab) -> None:
    say(tab, "Hello " * 600)
    tab.until(f"{HAS_ANSWERED} && document.querySelectorAll('.said.error').length === 1")
    assert "accepted: 512 together" in last_said(tab, "server")
    tab.problems.clear()
    say(tab, "<img src=x onerror=\"document.title='taken'\"> and <script>document.title = 'taken'</script>")
    tab.until(f"{HAS_ANSWERED} && [...document.querySelectorAll('.said[data-who=model]')].pop().textContent.length > 0")
    assert tab.run("document.querySelectorAll('#talk img, #talk script').length") == 0
    assert tab.run("document.title") == "expertly"
    assert last_said(tab, "you").startswith("<img src=x")


def test_a_key_opens_it_and_stays_in_the_tab(window: Tab, demo: tuple[Any, Any]) -> None:
    with served(*demo, keys=(KEY,)) as guarded:
        window.open(f"{guarded.url}/")
        window.until("!document.querySelector('#locked').hidden")
        assert window.run("document.querySelector('#status').textContent") == "no key"
        window.type("#key", KEY)
        window.click("#unlock")
        window.until(READY)
        window.until("document.querySelector('#locked').hidden")
        say(window, "Hello")
        window.until(f"{HAS_ANSWERED} && document.querySelectorAll('.said').length === 2")
        assert last_said(window, "model")
        assert KEY not in window.run("document.documentElement.outerHTML")
        assert KEY not in "".join(window.asked)
    window.until("document.querySelector('#status').textContent === 'no answer'")  # the server is gone
    window.problems.clear()
