"""Which requests of a batch have pages of the KV cache, and whose tokens are in the next forward pass.

A part of transformers' continuous batching, in place of its own schedulers: these read prompts in the order of arrival,
and drop all pages that are kept for later prompts when a few are short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, takewhile
from typing import Any

import torch
from transformers.generation.continuous_batching import RequestState, RequestStatus, Scheduler

from expertly.store.pages import NUM_READERS, KeptPages

SHORT_TOKENS = 16
"""Of a short message, by whose passes parts of prompts are measured."""

_REMEMBERED = 0.9
"""What a pass weighs in the estimate of the next ones' duration, for each that came after it."""

_PART_WEIGHT = 0.001
"""What the last part weighs there: it says what a token takes where all passes had the same number."""

_BESIDE, _ALONE = 2.0, 12.0
"""Passes of a short message that a pass with a part takes as long as: beside others, and where nobody has come yet."""


class Pace:
    """How long passes take. For those without a part of a prompt: a line through their tokens and durations. For those
    with a part, whose attention also reads what the cache holds before it: the last such pass.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # weighted: passes, tokens, seconds, squares of tokens, tokens times seconds
        self._part: tuple[int, float] | None = None  # tokens and seconds of the last pass with one

    def note(self, num_tokens: int, seconds: float, *, is_part: bool) -> None:
        if is_part:
            self._part = num_tokens, seconds
        else:
            values = _point(num_tokens, seconds, 1.0)
            self._sums = [old * _REMEMBERED + new for old, new in zip(self._sums, values, strict=True)]

    def tokens_of(self, num_passes: float, num_tokens: int, num_written: int) -> float:
        """How many tokens a pass with a part has, those of `num_written` texts among them, to take as long as so many
        passes of so many tokens: it nears them pass by pass. At least a short message beside what is written; infinite
        while nothing ran that says it.
        """
        sums = self._sums
        if not sums[0]:
            return float("inf")
        if self._part is None:
            return num_passes * num_tokens
        size, part_s = self._part
        points = zip(sums, _point(size, part_s, _PART_WEIGHT), strict=True)
        weight, tokens, seconds, squares, products = (short + part for short, part in points)
        spread = squares * weight - tokens**2
        each = min(seconds / tokens, max(0.0, (products * weight - tokens * seconds) / spread)) if spread > 0 else 0.0
        short_s = seconds / weight + each * (num_tokens - tokens / weight)
        step = min(2.0, max(0.5, num_passes * short_s / part_s)) if part_s > 0 else 2.0
        return max(num_written + SHORT_TOKENS, size * step)


def _point(num_tokens: int, seconds: float, weight: float) -> list[float]:
    return [weight * value for value in (1.0, num_tokens, seconds, num_tokens**2, num_tokens * seconds)]


class Turns(Scheduler):  # type: ignore[misc]
    """A prompt begins, in the order of arrival, when there are pages for all of it; a text takes pages as it grows.
    Where there are none, the youngest request gives its pages back and begins again later: what it has written is then
    a part of its prompt, whose pages the cache keeps until others need them.

    Each pass holds a token of every text that is being written, and parts of prompts, those first that have the least
    left. If it can finish some prompts, it leaves out those that it cannot, but not twice in a row. Of these, the
    one with the least left and the oldest take turns.

    A new request waits for the pass that runs. A part of a prompt is therefore cut to the time of about two passes of a
    short message beside other requests, so that such a message takes about three times as long as alone; and to the
    time of twelve without others, so that the prompt takes hardly longer than in the largest parts. How many tokens
    those are is measured. A prompt that one pass can finish alone is not cut.
    """

    clock: Callable[[], float] = time.perf_counter

    pages: KeptPages | None = None  # on disk
    cache: Any  # its parts have other names in transformers 5.17
    _allocate_blocks_if_needed: Any

    def reset(self) -> None:
        super().reset()
        self.num_preempted = 0
        self._in_pass: set[str] = set()  # of the last pass
        self._are_parts_first = False  # what was being written left no room for them in the last pass
        self._are_long_owed = False  # the last pass had room for parts of long prompts, and none in it
        self._pace = Pace()
        self._num_tokens, self._began_s = 0, 0.0  # of the last pass, and when it began
        self._begun: set[str] = set()  # prompts of which a part was read
        self._had_part = False  # the last pass had one
        self._during: list[str] = []  # who was active during it
        self._has_company = False  # others wrote since the prompts that are being read began
        self._is_oldests_turn = False  # of long prompts, the last parts were first of the oldest, not of the shortest
        # none in transformers 5.17, which counts kept pages as free and drops them itself; only the first has pages
        self._allocators: list[Any] = list(getattr(self.cache, "cache_allocators", {}).values())[:1]
        self._page_tokens = self._allocators[0].tokens_per_page if self._allocators else self.cache.block_size

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[Any], bool, int, int]:
        now_s = type(self).clock()
        if any(name in self.active_requests for name in self._during):  # else there was nothing to do meanwhile
            self._pace.note(self._num_tokens, now_s - self._began_s, is_part=self._had_part)
        self._grow()
        self._begin()
        writing = self._writing()
        num_left = sum(map(_num_left, self.active_requests.values()))
        is_beside = bool(self._has_company or writing)
        if is_beside or num_left > token_budget:
            num_passes, num_tokens = (_BESIDE, SHORT_TOKENS + len(writing)) if is_beside else (_ALONE, SHORT_TOKENS)
            token_budget = int(min(token_budget, self._pace.tokens_of(num_passes, num_tokens, len(writing))))
        parts = self._parts(token_budget)
        ordered = [*parts, *writing] if self._are_parts_first else [*writing, *parts]
        turns = list({state.request_id: state for state in ordered}.values())
        batch, _, is_decode, num_tokens, num_read = self._process_candidates(turns, token_budget, cache_budget, set())
        self.starved_requests = []
        self._in_pass = {future.state.request_id for future in batch}
        self._during, self._began_s, self._num_tokens = list(self.active_requests), now_s, num_tokens
        self._had_part = self._note_parts()
        is_written = self._has_company or any(future.has_new_token for future in batch)
        self._has_company = is_written and bool(self._of_status(RequestStatus.PREFILLING))
        self._are_parts_first = bool(parts) and not any(state.request_id in self._in_pass for state in parts)
        return batch, is_decode, num_tokens, num_read

    def _note_parts(self) -> bool:
        """Whether the pass has a part of a prompt, the last one among them."""
        reading = {state.request_id for state in self._of_status(RequestStatus.PREFILLING)}
        before, self._begun = self._begun, reading & (self._begun | self._in_pass)
        return bool(self._in_pass & (before | reading))

    def free_share(self) -> float:
        """The share of the cache that no request has. Any thread may ask."""
        if not self._allocators:
            return float(self.cache.get_num_free_blocks() / self.cache.num_blocks)
        kept = sum(len(allocator.ledger.cached_blocks) * allocator.bytes_per_block for allocator in self._allocators)
        total = self.cache.num_sectors * self.cache.bytes_per_sector
        return float((self.cache.compute_free_capacity(relative=False) + kept) / total)

    # -- whose turn it is ----------------------------------------------------------------------------------------------

    def _of_status(self, status: RequestStatus) -> list[RequestState]:
        return [state for state in _by_age(self.active_requests.values()) if state.status == status]

    def _writing(self) -> list[RequestState]:
        """Texts that are being written, first those that the last pass had no room for. A pass reads at most as many
        tokens as the cache holds, and counts tokens that several texts share once for each text.
        """
        return sorted(self._of_status(RequestStatus.DECODING), key=lambda state: state.request_id in self._in_pass)

    def _parts(self, token_budget: int) -> list[RequestState]:
        """Prompts whose parts the pass reads."""
        reading = self._of_status(RequestStatus.PREFILLING)
        left = token_budget - len(self._of_status(RequestStatus.DECODING))
        left = left // 2 if self._are_long_owed else left
        short, long = [], sorted(reading, key=_num_left)
        while long and _num_left(long[0]) <= left:
            left -= _num_left(long[0])
            short.append(long.pop(0))
        self._are_long_owed = bool(short and long) and not self._are_long_owed
        if not long or self._are_long_owed:
            return short
        self._is_oldests_turn = not self._is_oldests_turn
        return [*short, *(_by_age(long)[: int(self._is_oldests_turn)]), *long]

    # -- who has pages -------------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        """Give each text that is being written the page of its next token, the oldest first."""
        for state in self._of_status(RequestStatus.DECODING):
            while state.request_id in self.active_requests and not self._take(state, 1):
                assert len(self.active_requests) > 1, "the cache holds the longest text"
                self._give_back(_by_age(self.active_requests.values())[-1])
                self.num_preempted += 1

    def _begin(self) -> None:
        for state in _by_age(self.waiting_requests.values()):
            if not self._is_read_by_another(state) and not self._admit(state):
                assert self.active_requests, "the cache holds the longest text"
                break

    def _is_read_by_another(self, state: RequestState) -> bool:
        """Whether another request will have read more of this prompt's pages than it has now."""
        prompt = state.initial_tokens
        for other in self.active_requests.values() if self.cache.use_prefix_sharing else ():
            end = (other.position_offset // self._page_tokens + 1) * self._page_tokens
            if end < len(prompt) and prompt[:end] == other.initial_tokens[:end]:
                return True
        return False

    def _admit(self, state: RequestState) -> bool:
        """Begin a prompt, with the pages of its beginning that the cache or the disk has and new ones for the rest."""
        if self.pages is not None:
            self._bring(self.pages, state.remaining_prefill_tokens)
        rest = self._infer_request_tokens(state, set())
        self.waiting_requests.pop(state.request_id, None)
        self.waiting_requests_order.remove(state.request_id)
        self.active_requests[state.request_id] = state
        state.status = RequestStatus.PREFILLING
        if self._take(state, len(rest)):
            return True
        self._give_back(state)
        return False

    def _take(self, state: RequestState, num_tokens: int) -> bool:
        """Give a request pages for so many more tokens, where there are enough: free ones, then those that have been
        kept for later prompts the longest.
        """
        if not self._allocators:
            return bool(self._allocate_blocks_if_needed(state, num_tokens))
        self.cache.pool.try_to_free_sectors()
        for allocator in self._allocators:
            if not self._free(allocator, allocator.needs_new_blocks(state.request_id, state.current_len(), num_tokens)):
                return False
        return bool(self.cache.can_store_request_tokens(state, num_tokens))

    def _free(self, allocator: Any, num: int, needed: Container[int] = ()) -> bool:
        """Have so many pages free, where there are enough, by dropping kept ones that are not `needed`."""
        pool, ledger = self.cache.pool, allocator.ledger
        missing = num - pool.count_free_blocks(allocator.index) - pool.num_free_sectors * allocator.blocks_per_sector
        dropped = list(islice((block for block in ledger.cached_blocks if block not in needed), max(0, missing)))
        if missing > len(dropped):
            return False
        for block in dropped:
            del ledger.cached_blocks[block], ledger.hash_to_block[ledger.block_to_hash.pop(block)]
            pool.free_blocks(allocator.index, [block])
        return True

    def _give_back(self, state: RequestState) -> None:
        """Let a request wait again, as old as it is."""
        if self._allocators or state.allocated_blocks:  # else transformers 5.17 warns
            self.finish_request(state.request_id)
        self.active_requests.pop(state.request_id, None)
        again = state.create_equivalent_initial_request()
        again.created_time = state.created_time
        if not state.generated_tokens:  # else it says that this request has written, and nobody counts what was cached
            again._true_initial_tokens = state._true_initial_tokens
        self.add_waiting_request(again)

    def finish_request(self, request_id: str) -> None:
        state = self.active_requests.get(request_id)
        if state is not None and state.status == RequestStatus.FINISHED and self.cache.use_prefix_sharing:
            tokens, num_done = state.initial_tokens + state.generated_tokens, state.position_offset // self._page_tokens
            for allocator in self._allocators:  # transformers does not keep the pages that its last pass completed
                kept = sum(block in allocator.ledger.block_to_hash for block in allocator.block_table[request_id])
                allocator.mark_complete_blocks(request_id, tokens, num_done - kept)
        self._keep_beginnings([request_id])
        super().finish_request(request_id)

    def clear_cancelled_requests(self) -> list[RequestState]:
        self._keep_beginnings(self._requests_to_cancel)
        return list(super().clear_cancelled_requests())

    def _keep_beginnings(self, names: Iterable[str]) -> None:
        """Of pages that requests are about to give back, drop the last first: without the first, none can be found."""
        for name in names:
            if self.pages is not None:
                self._put(self.pages, name)
            for allocator in self._allocators:
                allocator.block_table.get(name, []).reverse()

    def _put(self, pages: KeptPages, name: str) -> None:
        """Write the pages of a request that are not on disk yet."""
        (allocator,), state = self._allocators, self.active_requests.get(name)
        if state is not None:
            names = pages.names(state.initial_tokens + state.generated_tokens, self._page_tokens)
            for page, block in zip(names, allocator.block_table.get(name, ()), strict=False):
                if block in allocator.ledger.block_to_hash and page not in pages:
                    pages.write(page, allocator._copy_view[block].cpu().numpy().tobytes())

    def _bring(self, pages: KeptPages, prompt: list[int]) -> None:
        """Have the cache keep the pages of a prompt's beginning that are on disk, behind those that it has; nothing is
        read where there are not enough pages for all of the prompt.
        """
        from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash

        (allocator,), ledger, pool = self._allocators, self._allocators[0].ledger, self.cache.pool
        there: list[int] = allocator.match_prefix_blocks(prompt)
        parent = ledger.block_to_hash[there[-1]] if there else None
        if not self._free(allocator, -(-len(prompt) // self._page_tokens) - len(there), set(there)):
            return
        names = list(pages.names(prompt[:-1], self._page_tokens))
        missing = list(takewhile(pages.__contains__, names[len(there) :]))
        while pool.count_free_blocks(allocator.index) < len(missing):
            pool.allocate_sector(allocator.index)
        blocks = pool.get_free_blocks(allocator.index, len(missing))
        memory = (allocator._copy_view[block] for block in blocks)
        with ThreadPoolExecutor(NUM_READERS) as readers:
            num_read = (*readers.map(partial(_read, pages), missing, memory), False).index(False)
        pool.free_blocks(allocator.index, blocks[num_read:])
        pages.used(names[: len(there) + num_read])
        for number, block in enumerate(blocks[:num_read], len(there)):
            parent = compute_block_hash(parent, prompt[number * self._page_tokens : (number + 1) * self._page_tokens])
            if ledger.register_new_hash(block, parent) is None:
                ledger.cached_blocks[block] = None
            else:
                pool.free_blocks(allocator.index, [block])


@torch.inference_mode()
def _read(pages: KeptPages, name: str, memory: torch.Tensor) -> bool:
    content = memory if memory.device.type == "cpu" else torch.empty_like(memory, device="cpu")
    is_read = pages.read(name, content.numpy().data)
    memory.copy_(content)
    return is_read


def _by_age(states: Iterable[RequestState]) -> list[RequestState]:
    """The oldest first."""
    return sorted(states, key=lambda state: state.created_time)


def _num_left(state: RequestState) -> int:
    return len(state.remaining_prefill_tokens)
