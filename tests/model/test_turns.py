"""Requests that share a KV cache, on tiny models: whose pages, whose turn, and that no text shows any of it."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig

from expertly.core.errors import ConfigError
from expertly.model.batching import Batch, Entry, Limits
from expertly.model.turns import SHORT_TOKENS, Turns
from expertly.store.pages import KeptPages, remove_pages
from tests.families import VOCAB_SIZE, generate, make_model
from tests.tables import seeds
from tests.waiting import until

PAGE = 8  # tokens

keeps_all = pytest.mark.skipif(
    not hasattr(ContinuousBatchingConfig, "page_size"), reason="transformers 5.17 forgets a page, and drops others"
)


class Passes:
    """A batch, the tokens of each of its requests, and those of each forward pass."""

    def __init__(
        self,
        model: Any,
        num_pages: int,
        budget: int = 64,
        pages: KeptPages | None = None,
        seconds: Callable[[int], float] = lambda num_tokens: 1.0,
    ) -> None:
        """`seconds`: what a pass of so many tokens takes, by the clock of the batch."""
        self.tokens: dict[str, list[int]] = {}
        self.sizes: list[int] = []
        self.first: dict[str, int] = {}  # the pass that gave a request its first token
        self.cached: dict[str, int] = {}
        self.errors: list[BaseException] = []
        self.before: Callable[[int], object] = lambda number: None  # called before each pass
        self.now_s = 0.0
        self._seconds = seconds
        self._left: dict[str, int] = {}
        self._changed = threading.Condition()
        self._hook = model.register_forward_pre_hook(self._begins, with_kwargs=True)
        self.batch = Batch(model, Limits(PAGE, num_pages, budget, 32), self._choose, self._failed, pages)

    def ask(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        with self._changed:
            self.tokens[name], self._left[name] = [], max_tokens
        self.batch.submit(Entry(name, prompt, max_tokens, []))

    def cancel(self, name: str) -> None:
        self.batch.cancel(name)
        with self._changed:
            self._left.pop(name, None)

    def wait(self) -> None:
        """Until all that was asked for has been written, and its pages are given back."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.errors or not any(self._left.values()), 60), self._left
        assert not self.errors, self.errors
        until(lambda: self.batch.free_share() == 1)

    def close(self) -> None:
        self.batch.close()
        self._hook.remove()

    def _begins(self, model: Any, arguments: Any, kwargs: Any) -> None:
        self.sizes.append(kwargs["input_ids"].numel())
        self.now_s += self._seconds(self.sizes[-1])
        self.before(len(self.sizes))

    def _choose(self, names: Sequence[str], logits: torch.Tensor) -> list[int | None]:
        with self._changed:
            for name, token in zip(names, logits.argmax(-1).tolist(), strict=True):
                if name not in self._left:  # it was cancelled while the pass ran
                    continue
                if not self.tokens[name]:
                    self.first[name], self.cached[name] = len(self.sizes), self.batch.num_cached(name)
                self.tokens[name].append(token)
                self._left[name] -= 1
            self._changed.notify()
        return [None] * len(names)

    def _failed(self, of_step: Sequence[str], waiting: Sequence[str], error: BaseException) -> None:
        with self._changed:
            self.errors.append(error)
            self._changed.notify()


@cache
def tiny(family: str) -> Any:
    return make_model(family)


@contextmanager
def passes(family: str = "qwen3_moe", **limits: Any) -> Iterator[Passes]:
    with pytest.MonkeyPatch.context() as patched:
        made = Passes(tiny(family), **limits)
        patched.setattr(Turns, "clock", lambda: made.now_s)
        try:
            yield made
        finally:
            made.close()


def written_alone(
    family: str, folder: Path, text: Sequence[int], num_tokens: int, about: bytes = b"model"
) -> tuple[list[int], int]:
    """What a new batch writes behind a text, and how much of that it found in pages that are kept in `folder`."""
    with passes(family, num_pages=20, pages=KeptPages(folder, 1 << 20, about)) as made:
        made.ask("alone", text, num_tokens)
        made.wait()
    return made.tokens["alone"], made.cached["alone"]


def drawn(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(4, VOCAB_SIZE), k=length)


FAMILIES = pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # of the second, half of the layers slide


@pytest.mark.parametrize("seed", seeds(2, 4))
@FAMILIES
def test_texts_are_those_of_generate_however_few_pages_there_are(family: str, seed: int) -> None:
    draw = random.Random(seed)
    begun = [drawn(20, 9), drawn(45, 8)]  # many begin alike
    asked = {}
    for number in range(14):
        prompt = [*draw.choice(begun)[: draw.randint(0, 45)], *drawn(draw.randint(1, 60), 100 * seed + number)]
        asked[f"{number}"] = prompt, draw.randint(1, 130 - len(prompt))
    texts = generate(tiny(family), [prompt for prompt, _ in asked.values()], max(size for _, size in asked.values()))
    expected = {name: text[:size] for (name, (_, size)), text in zip(asked.items(), texts, strict=True)}
    with passes(family, num_pages=19) as made:  # the longest takes 17
        later, gone = list(asked)[4:], set[str]()

        def come(number: int) -> None:
            if later and number % 3 == 0:
                made.ask(later[0], *asked[later.pop(0)])
            if number % 40 == 0:
                gone.add(name := draw.choice(list(made.tokens)))
                made.cancel(name)

        for name in list(asked)[:4]:
            made.ask(name, *asked[name])
        made.before = come
        made.wait()
        while later:  # where all that had come ended before
            made.ask(later[0], *asked[later.pop(0)])
            made.wait()
        for name in gone:
            assert expected.pop(name)[: len(made.tokens[name])] == made.tokens.pop(name)
        assert made.tokens == expected
        assert made.batch.num_preempted() > 0 and max(made.sizes) <= 64


def test_pages_are_taken_as_texts_grow_and_the_youngest_gives_way() -> None:
    """Four texts that may each fill the cache write together; each ends, the oldest first."""
    prompts = [drawn(20, seed) for seed in range(4)]
    expected = generate(tiny("qwen3_moe"), prompts, 80)
    ends: list[str] = []
    with passes(num_pages=14) as made:  # one is 13 pages at its end
        for number, prompt in enumerate(prompts):
            made.ask(f"{number}", prompt, 80)

        def look(number: int) -> None:
            ends.extend(name for name in made.tokens if len(made.tokens[name]) == 80 and name not in ends)

        made.before = look
        made.wait()
        assert max(made.first.values()) <= 4, "none waited for another's end"
        assert ends == ["0", "1", "2"] and made.batch.num_preempted() >= 3
        assert list(made.tokens.values()) == expected


def test_prompts_begin_in_the_order_of_arrival() -> None:
    """One that needs more pages than are free is not overtaken by those that need fewer."""
    with passes(num_pages=14) as made:
        made.ask("first", drawn(50, 0), 50)
        made.before = lambda number: (
            made.ask(f"small {number}", drawn(4, number), 2) if number in range(3, 20) else None
        )
        made.ask("large", drawn(60, 1), 2)
        made.wait()
        assert min(made.first[name] for name in made.first if name.startswith("small")) > 50
        assert made.first["large"] > 50, "there is no room before the first has ended"


def test_what_is_written_again_is_read_from_the_cache() -> None:
    """Of a text that was preempted, no more is computed again than others took of its pages."""
    with passes(num_pages=14) as made:
        made.ask("old", drawn(40, 0), 40)  # 10 pages
        made.ask("young", drawn(20, 1), 40)  # 8 pages
        made.wait()
        computed, least = sum(made.sizes), 40 + 39 + 20 + 39
        assert made.batch.num_preempted() >= 1
        assert computed - least <= 6 * PAGE


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    with passes(num_pages=400) as made:
        made.ask("long", drawn(1000, 0), 2)
        made.ask("middle", drawn(300, 1), 2)
        came = {f"short {number}": number for number in range(3, 30)}
        made.before = lambda number: (
            made.ask(f"short {number}", drawn(12, number), 3) if number in came.values() else None
        )
        made.wait()
        assert max(made.first[name] - number for name, number in came.items()) == 1, "the next pass has its first token"
        assert made.first["middle"] < made.first["long"]


@pytest.mark.parametrize(("num_new", "length"), [(1, 12), (5, 13), (1, 100)])
def test_a_long_prompt_is_read_whatever_comes(num_new: int, length: int) -> None:
    """With each pass others come that have less left: at least half of every fourth pass is the oldest's own."""

    def come(number: int) -> None:
        for each in range(num_new if "long" not in made.first else 0):
            made.ask(f"{number} {each}", drawn(length, 10 * number + each), 1)

    with passes(num_pages=2000) as made:
        made.ask("long", drawn(600, 0), 1)
        made.before = come
        made.wait()
        assert made.first["long"] <= 4 * (600 // 32 + 1)


def test_a_short_prompts_pass_holds_no_part_of_a_long_one() -> None:
    with passes(num_pages=400, budget=64) as made:
        made.before = lambda number: made.ask("short", drawn(12, 1), 1) if number == 3 else None
        made.ask("long", drawn(500, 0), 1)
        made.wait()
        assert made.sizes[3] == 12 and made.sizes[2] == made.sizes[4] == 64


@pytest.mark.parametrize(
    ("fixed_s", "each_s", "part", "alone"),
    [(0.0, 0.001, 32, 192), (0.005, 0.001, 37, 247), (0.04, 0.001, 72, 256), (0.5, 0.0, 256, 256)],
    ids=["as long as its tokens", "as 5 tokens and its own", "as 40", "as long whatever it reads"],
)
def test_parts_take_as_long_as_a_few_short_messages(fixed_s: float, each_s: float, part: int, alone: int) -> None:
    """Beside others a part and their tokens take at most twice as long as a message of 16 and these would. Before
    anybody comes, twelve times, so that a prompt that nobody disturbs takes at most 8 % longer than in whole parts.
    """

    def seconds(num_tokens: int) -> float:
        return fixed_s + each_s * num_tokens

    with passes(num_pages=700, budget=256, seconds=seconds) as made:
        made.ask("long", drawn(3000, 0), 1)
        made.before = lambda number: made.ask(f"short {number}", drawn(12, number), 2) if number in (3, 8, 9) else None
        made.wait()
        assert made.sizes[:3] == [256] * 3, "nothing else ran that says what a pass takes"
        assert made.sizes[3] == 12 and made.first["short 8"] == 9
        later = made.sizes[12:-1]  # when the durations of two sizes are known
        assert set(later) == {part} or max(later) - part <= 1 >= part - min(later)
        assert part == 256 or seconds(max(later)) <= 2 * seconds(SHORT_TOKENS) + each_s
        begin_s, num_passes = made.now_s, len(made.sizes)
        made.ask("alone", drawn(4000, 3), 1)
        made.wait()
        parts = made.sizes[num_passes:-1]
        assert all(abs(size - alone) <= 1 for size in parts[5:]) and max(parts) <= alone + 1, "it nears them"
        assert seconds(max(parts)) <= 12 * seconds(SHORT_TOKENS) + each_s
        assert made.now_s - begin_s <= 1.08 * (15 * seconds(256) + seconds(4000 - 15 * 256))
        num_passes = len(made.sizes)
        made.ask("short", drawn(256, 4), 1)
        made.wait()
        assert made.sizes[num_passes:] == [256], "one pass finishes it"


def test_parts_take_no_longer_where_tokens_do_that_have_much_before_them() -> None:
    """A token's attention reads all that is in the cache. A prompt's end, which also does, is no short message."""
    read, took = 0, []

    def seconds(num_tokens: int) -> float:
        nonlocal read
        read += num_tokens if num_tokens != 12 else 0
        took.append(0.02 + 0.001 * num_tokens * (1 + read / 500 if num_tokens != 12 else 1))
        return took[-1]

    with passes(num_pages=700, budget=256, seconds=seconds) as made:

        def come(number: int) -> None:
            if turn != 1 and number % 8 == 3:
                made.ask(f"short {number}", drawn(12, number), 2)

        made.before = come
        for turn in range(3):  # beside others, alone, beside others
            first, read = len(made.sizes), 0
            made.ask(f"long {turn}", drawn(1600, turn), 3)
            made.wait()
            if turn == 1:
                continue
            passed = zip(made.sizes[first:], took[first:], strict=True)
            parts = [duration for size, duration in passed if size not in (1, 12)][10:-1]
            assert len(parts) > 20 and max(parts) <= 1.3 * 2 * (0.02 + 0.001 * (SHORT_TOKENS + 1))
        shorts = [num - int(name.split()[1]) for name, num in made.first.items() if name.startswith("short")]
        assert set(shorts) <= {1, 2} and shorts.count(2) <= 1, "in the next pass, but where a long prompt is owed half"


@keeps_all
@FAMILIES
@pytest.mark.parametrize("written", range(1, 2 * PAGE, 3))
@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_second_turn_reads_what_is_new_and_at_most_a_page(family: str, written: int, is_preempted: bool) -> None:
    first = drawn(130, 0)
    with passes(family, num_pages=36) as made:  # "old" has 19 when "first" takes the other 17, and soon needs one more
        made.ask("old", drawn(150, 7), 6 * PAGE if is_preempted else 1)
        made.before = lambda number: made.ask("first", first, written) if number == 3 else None
        made.wait()
        assert (made.batch.num_preempted() > 0) == is_preempted
        history = [*first, *made.tokens["first"]]
        before = sum(made.sizes)
        made.ask("second", [*history, *drawn(10, 1)], 1)
        made.wait()
        assert sum(made.sizes) - before <= 10 + PAGE
        assert made.cached["second"] >= len(history) - PAGE


@keeps_all
def test_pages_that_are_needed_are_taken_from_the_ends_of_kept_texts() -> None:
    """The beginning of a kept text stays useful when the rest of its pages is needed for another."""
    with passes(num_pages=32) as made:
        made.ask("kept", prompt := drawn(24 * PAGE, 0), 1)
        made.wait()
        made.ask("other", drawn(15 * PAGE, 1), 1)  # 16 pages; 8 are free
        made.wait()
        made.ask("again", prompt, 1)
        made.wait()
        assert made.cached["again"] == 17 * PAGE


def test_a_prompt_that_several_texts_have_is_read_once() -> None:
    with passes(num_pages=60) as made:
        for number in range(3):
            made.ask(f"{number}", drawn(150, 0), 4)
        made.wait()
        assert sum(made.sizes) <= 150 + 2 * PAGE + 3 * 3
        assert made.tokens["0"] == made.tokens["1"] == made.tokens["2"]


def test_texts_that_share_more_than_a_pass_may_read_take_turns_with_others() -> None:
    """A pass reads no more tokens from the cache than that has; four texts with one prompt would read twice as many."""
    shared, other = drawn(150, 0), drawn(100, 1)
    expected = [generate(tiny("qwen3_moe"), [prompt], size)[0] for prompt, size in ((shared, 40), (other, 5))]

    def look(number: int) -> None:
        lengths = [len(made.tokens[f"{each}"]) for each in range(4)]
        assert number < 8 or max(lengths) - min(lengths) <= 15
        if number == 8:
            made.ask("other", other, 5)

    with passes(num_pages=44) as made:  # 352 tokens
        for number in range(4):
            made.ask(f"{number}", shared, 40)
        made.before = look
        made.wait()
        assert [made.tokens[name] for name in made.tokens] == [expected[0]] * 4 + [expected[1]]
        assert made.first["other"] <= 8 + 2 * 2, "it is read in two parts"
        assert made.batch.num_preempted() == 0


@FAMILIES
def test_what_was_read_and_written_is_found_on_disk_after_a_restart(family: str, tmp_path: Path) -> None:
    """All but the last page of it, and the new tokens: texts are those of `generate`."""
    prompt, turns, alone = drawn(50, 1), [drawn(5, 2), drawn(9, 3)], partial(written_alone, family)
    said: list[int] = []
    for number, more in enumerate(turns):
        text = [*prompt, *said, *more]
        expected = generate(tiny(family), [text], 20)[0]
        written, num_cached = alone(tmp_path / "kv", text, 20)
        assert written == expected
        before = len(prompt) + len(said) if number else 0
        assert before - PAGE < num_cached + 1 <= before + 1 or not number, "no more than a page is lost"
        said = [*said, *more, *expected]
    files = sorted((tmp_path / "kv").iterdir())
    contents = [page.read_bytes() for page in files]
    for page, another in zip(files, contents[1:] + contents[:1], strict=True):
        page.write_bytes(another)
    assert alone(tmp_path / "kv", text, 20) == (expected, 0), "another page under this name"
    for page in (tmp_path / "kv").iterdir():
        content = bytearray(page.read_bytes())
        content[7] ^= 1
        page.write_bytes(content)
    assert alone(tmp_path / "kv", text, 20) == (expected, 0), "a flipped bit is found"
    assert alone(tmp_path / "kv", text, 20, b"another model") == (expected, 0)


def test_pages_that_others_needed_come_back_from_disk(tmp_path: Path) -> None:
    """With a cache of ten pages; some begin alike, and some of a beginning are still in memory."""
    model, draw = tiny("qwen3_moe"), random.Random(0)
    begun = [drawn(50, 7), drawn(61, 8), drawn(44, 9)]
    with passes(num_pages=10, pages=KeptPages(tmp_path / "kv", 1 << 24, b"model")) as made:
        for number in range(16):
            prompt = [*begun[number % 3][: draw.randint(20, 61)], *drawn(draw.randint(0, 4), number)]
            made.ask(str(number), prompt, 8)
            if number % 4:
                made.wait()
            assert number % 4 == 0 or made.tokens[str(number)] == generate(model, [prompt], 8)[0]
        made.wait()
        assert sum(cached > 0 for cached in made.cached.values()) > 8


def test_a_text_that_goes_on_stays_on_disk_from_its_beginning(tmp_path: Path) -> None:
    """Though its first pages were written before those of texts that nobody continued, and found in memory since."""
    with passes(num_pages=80, pages=KeptPages(tmp_path / "kv", 1 << 20, b"model")) as made:
        made.ask("page", drawn(PAGE, 9), 1)
        made.wait()
    (page,) = (tmp_path / "kv").iterdir()
    most_nbytes = 12 * page.stat().st_size
    text = drawn(5 * PAGE, 0)
    with passes(num_pages=80, pages=(kept := KeptPages(tmp_path / "kv", most_nbytes, b"model"))) as made:
        for turn in range(6):
            text += drawn(PAGE // 2, turn)
            for name, tokens in (("text", text), ("another", drawn(3 * PAGE, 10 + turn))):
                made.ask(f"{name} {turn}", tokens, 1)
                made.wait()
                until(lambda tokens=tokens: all(page in kept for page in kept.names(tokens, PAGE)))
    with passes(num_pages=80, pages=KeptPages(tmp_path / "kv", most_nbytes, b"model")) as made:
        made.ask("again", [*text, 5], 1)
        made.wait()
    assert made.cached["again"] == 8 * PAGE


def test_the_disk_holds_no_more_than_it_may(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The pages that were used the longest ago go; what is not a page stays, and a disk that is full is a warning."""
    folder = tmp_path / "kv"
    pages = KeptPages(folder, 3 * 1008, b"")
    names = list(pages.names(range(40), 8))
    (folder / "mine").write_text("stays")
    for number, name in enumerate(names):
        pages.write(name, bytes([number]) * 1000)
        if number == 2:
            pages.close()
            pages = KeptPages(folder, 3 * 1008, b"")
            assert pages.read(names[0], memoryview(page := bytearray(1000))) and page == bytes(1000)
            pages.used(names[:1])
    pages.close()
    assert {path.name for path in folder.iterdir()} == {"mine", names[0], *names[3:]}
    remove_pages(folder)
    assert [path.name for path in folder.iterdir()] == ["mine"]
    pages = KeptPages(folder, 1 << 20, b"")
    shutil.rmtree(folder)
    pages.write(names[0], b"lost")
    pages.close()
    assert "nothing more is kept there" in caplog.text and names[0] not in pages
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv_disk: .*file cannot be used: a file is in the way"):
        KeptPages(tmp_path / "file", 1, b"")


def test_pages_are_not_read_for_a_prompt_that_has_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are once it begins, and once each."""
    names, read = list[str](), KeptPages.read

    def noted(self: KeptPages, name: str, page: memoryview) -> bool:
        names.append(name)
        return read(self, name, page)

    monkeypatch.setattr(KeptPages, "read", noted)
    prompt = drawn(60, 5)
    with passes(num_pages=10, pages=KeptPages(tmp_path / "kv", 1 << 24, b"model")) as made:
        made.ask("first", prompt, 4)
        made.wait()
    with passes(num_pages=10, pages=KeptPages(tmp_path / "kv", 1 << 24, b"model")) as made:
        made.ask("long", drawn(30, 6), 30)
        made.before = lambda number: made.ask("again", prompt, 4) if number == 2 else None
        made.wait()
    assert made.tokens["again"] == generate(tiny("qwen3_moe"), [prompt], 4)[0] and made.cached["again"] == 56
    assert made.first["again"] > made.first["long"] + 20 and len(names) == 7
