"""Requests that come and go while a model runs, with tokens that the caller chooses.

A `Stepper` runs submitted requests: a `Batch` many in one forward pass, with transformers' continuous batching;
`OneAtATime` one after the other with `generate`, for families without continuous batching (`why_not_together`). After
each forward pass its thread passes the logits to the caller's `Choose`. A request ends after its last token, when it is
cancelled, or when its pass fails; then `Failed` is called.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, StoppingCriteriaList
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING
from transformers.generation.logits_process import LogitsProcessorList

from expertly.core.errors import EngineClosedError, ExpertlyError, ModelUseError
from expertly.model.generation import KeptCache, generation_config
from expertly.model.hooks import CACHE
from expertly.model.pages import use_pages
from expertly.model.structure import first_line
from expertly.model.turns import Turns
from expertly.store.pages import KeptPages


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a batch: tokens of a page of the cache, pages, tokens and requests of a forward pass."""

    page_tokens: int
    num_pages: int
    max_batch_tokens: int
    max_requests: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A request. It ends after `max_new_tokens`, or after one of `end_tokens`."""

    name: str
    prompt: Sequence[int]
    max_new_tokens: int
    end_tokens: Sequence[int]


Choose = Callable[[Sequence[str], torch.Tensor], Sequence[int | None]]
"""One token for each request, by its name, from float32 logits [N, V]; None: the likeliest. Called in the thread that
runs the model, once a forward pass.
"""

Failed = Callable[[Sequence[str], Sequence[str], BaseException], None]
"""`failed(of_step, waiting, error)`: requests of the forward pass that failed, and those that were not in it. A thread
of the stepper calls it. The stepper has dropped them all, and takes new ones.
"""


class Stepper(Protocol):
    """Runs requests, in threads of its own. Any thread may call."""

    def submit(self, entry: Entry) -> None:
        """Run a request as soon as possible."""

    def cancel(self, name: str) -> None:
        """Drop a request, at the latest after the next forward pass. Unknown names are ignored."""

    def num_cached(self, name: str) -> int:
        """Tokens of the prompt that were not computed, as the KV cache of another request had them. Known when the
        first token has been chosen; asked once.
        """

    def free_share(self) -> float:
        """Of the KV cache: what no request has."""

    def num_preempted(self) -> int:
        """How often a request had to give its pages of the KV cache to others, and began again."""

    def is_alive(self) -> bool:
        """False where no request can run any more."""

    def close(self) -> None:
        """Drop all requests and end the threads. Idempotent."""


def end_tokens(model: Any) -> list[int]:
    """The tokens that end a text, from the model's generation config."""
    end = model.generation_config.eos_token_id
    if end is None:
        return []
    return [end] if isinstance(end, int) else list(end)


def _greedy_config(model: Any, max_new_tokens: int) -> GenerationConfig:
    """The model's own config for one sequence without sampling: the caller samples and looks for stop strings."""
    config: GenerationConfig = generation_config(model, max_new_tokens)
    config.min_length = config.min_p = config.typical_p = config.stop_strings = None
    return config


def _force(scores: torch.Tensor, tokens: Sequence[int | None]) -> torch.Tensor:
    """Scores [N, V] in which the chosen token is each row's largest; rows with None are unchanged."""
    forced = [(row, token) for row, token in enumerate(tokens) if token is not None]
    scores = scores.clone() if forced else scores
    for row, token in forced:
        scores[row] = -torch.inf
        scores[row, token] = 0.0
    return scores


# -- many in one forward pass ------------------------------------------------------------------------------------------

_POLL_S = 0.2
"""How often the watcher checks, while no result comes, whether the manager's thread still runs."""

_PAGE_FIELD = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"  # transformers 5.17

_LAST_WORDS_S = 2.0
"""The most time from a manager's first failed request to the end of its thread."""


class Batch:
    """Many requests in one forward pass, by turns. The cache must hold the longest of them.

    transformers' manager runs the model in a thread of its own. If it refuses a request, that one fails; if a pass
    raises, the manager ends with its cache. A second thread watches its results, and makes a new manager before it
    calls `failed`.
    """

    def __init__(
        self, model: Any, limits: Limits, choose: Choose, failed: Failed, pages: KeptPages | None = None
    ) -> None:
        """`pages`: those on disk, of a model that may keep some; `close` closes them."""
        self._model = model
        self._limits = limits
        self._pages = pages
        self._failed = failed
        self._processor = _ChoosingProcessor(choose, model._get_logits_processor(_greedy_config(model, 1)))
        self._lock = threading.Lock()  # guards the fields below
        self._running: dict[str, None] = {}
        self._is_closed = False
        self._num_preempted = 0  # under earlier managers
        self._manager = self._make()
        self._watcher = threading.Thread(target=self._watch, name="expertly-serve-batch", daemon=True)
        self._watcher.start()

    def submit(self, entry: Entry) -> None:
        with self._lock:
            self._running[entry.name] = None
            self._manager.add_request(
                list(entry.prompt),
                request_id=entry.name,
                max_new_tokens=entry.max_new_tokens,
                eos_token_id=list(entry.end_tokens) or -1,
            )

    def cancel(self, name: str) -> None:
        with self._lock:
            if name in self._running:
                del self._running[name]
                self._manager.cancel_request(name)
                self._processor.num_cached.pop(name, None)

    def num_cached(self, name: str) -> int:
        return self._processor.num_cached.pop(name, 0)

    def free_share(self) -> float:
        turns = self._turns
        return 1.0 if turns is None else turns.free_share()

    def num_preempted(self) -> int:
        turns = self._turns
        return self._num_preempted + (0 if turns is None else turns.num_preempted)

    @property
    def _turns(self) -> Turns | None:
        """None until the manager's thread has made its cache, and when it has ended."""
        processor = self._manager.batch_processor
        return None if processor is None else processor.scheduler

    def is_alive(self) -> bool:
        return self._watcher.is_alive()

    def close(self) -> None:
        self._is_closed = True
        with self._lock:
            if self._manager.is_running():
                self._manager.stop(block=True, timeout=60, hard_stop=True)
        if self._pages is not None:
            self._pages.close()
        if threading.current_thread() is not self._watcher:
            self._watcher.join()

    def _make(self) -> Any:
        limits = self._limits
        schedulers: Any = SCHEDULER_MAPPING
        schedulers["expertly"] = type("Turns", (Turns,), {"pages": self._pages})
        settings: Any = {_PAGE_FIELD: limits.page_tokens, "scheduler_type": "expertly", "safety_margin": 0.0}
        if hasattr(ContinuousBatchingConfig, "auto_switch_to_flash"):
            settings["auto_switch_to_flash"] = False  # it may download a kernel, which has no float32
        groups: Any = group_layers_by_attn_type(self._model.config.get_text_config())
        pages_of_blocks = len(groups[0]) if isinstance(groups, tuple) else 1  # transformers 5.17: a block is a group's
        config = ContinuousBatchingConfig(
            num_blocks=limits.num_pages * pages_of_blocks,
            max_batch_tokens=limits.max_batch_tokens,
            max_requests_per_batch=limits.max_requests,
            **settings,
        )
        greedy = _greedy_config(self._model, 1)
        greedy.eos_token_id = -1 if greedy.eos_token_id is None else greedy.eos_token_id  # each request has its own
        manager = self._model.init_continuous_batching(greedy, config)
        use_pages(self._model, manager)
        manager.logit_processor = self._processor
        self._processor.has_run = False
        manager.start()
        return manager

    def _watch(self) -> None:
        while not self._is_closed:
            output = self._manager.get_result(timeout=_POLL_S)
            if output is not None and output.error is None:
                with self._lock:
                    self._running.pop(output.request_id, None)
                continue
            thread = self._manager._generation_thread
            if output is not None and thread is not None:
                thread.join(timeout=_LAST_WORDS_S)  # a manager that ends fails its requests first
            if not self._is_closed and (thread is None or not thread.is_alive()):
                self._recover()
            elif output is not None:
                self._refused(output.request_id, output.error)

    def _refused(self, name: str, reason: str) -> None:
        """One request has failed; the manager continues."""
        with self._lock:
            was_running = name in self._running
            self._running.pop(name, None)
        if was_running:
            self._failed([name], [], RuntimeError(reason))

    def _recover(self) -> None:
        """The manager has ended: fail all its requests, and make a new one."""
        error = self._manager.background_thread_status.fatal_error or RuntimeError("the batch's thread ended")
        if not self._processor.has_run:  # it could not even begin: a new one could not either
            error = EngineClosedError(f"continuous batching cannot run: {type(error).__name__}: {error}")
        with self._lock:
            if self._is_closed:
                return
            in_pass = {future.state.request_id for future in self._processor.in_pass}
            of_step = [name for name in self._running if name in in_pass]
            waiting = [name for name in self._running if name not in in_pass]
            self._running.clear()
            self._processor.in_pass = []
            self._processor.num_cached.clear()
            num_preempted = self.num_preempted()
            try:
                self._manager.stop(block=True)
                self._num_preempted = num_preempted
                if isinstance(error, EngineClosedError):
                    raise error
                self._manager = self._make()
            except Exception as raised:  # of any kind: nothing runs any more, and all requests must fail
                self._is_closed = True
                waiting = []
                if raised is not error:
                    error = EngineClosedError(f"continuous batching could not be begun again: {raised}")
        self._failed(of_step, waiting, error)


class _ChoosingProcessor:
    """Takes the place of the manager's logits processors: it gets the requests and the logits of each pass."""

    do_processing = True
    tensors_required = 0  # of arguments a request: none

    def __init__(self, choose: Choose, processors: LogitsProcessorList) -> None:
        """`processors`: the model's own that are not for sampling, as a repetition penalty or suppressed tokens."""
        self._choose = choose
        self._processors = processors
        self.in_pass: list[Any] = []  # requests of the running pass, or the last one
        self.num_cached: dict[str, int] = {}  # of the prompt of each request that has no token yet, or just its first
        self.has_run = False  # since it was given to a manager

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Called by the manager, as the next: there are no arguments."""

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        pass

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: torch.Tensor) -> torch.Tensor:
        self.in_pass = list(requests_in_batch)
        self.has_run = True
        for future in self.in_pass:
            state = future.state
            if not state.generated_tokens and not state._true_initial_tokens:  # it has written nothing yet
                self.num_cached.setdefault(state.request_id, state.position_offset - future.query_length)
        return arg_storage

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, args: torch.Tensor) -> torch.Tensor:
        """Scores [N, V] in which the chosen token is each row's largest. Rows behind those with a new token are
        padding.
        """
        states = [future.state for future in self.in_pass if future.has_new_token]
        if not states:
            return scores
        if self._processors:
            scores = scores.clone()
            for row, state in enumerate(states):
                so_far: Any = torch.tensor([[*state.initial_tokens, *state.generated_tokens]], device=scores.device)
                scores[row] = self._processors(so_far, scores[row : row + 1])[0]
        return _force(scores, self._choose([state.request_id for state in states], scores[: len(states)]))


# -- one at a time -----------------------------------------------------------------------------------------------------


class OneAtATime:
    """For families that cannot share a forward pass: each request is one call of `generate`, in a thread. What the last
    one left in its KV cache the next one does not compute again.
    """

    def __init__(self, model: Any, choose: Choose, failed: Failed) -> None:
        self._model, self._choose, self._failed = model, choose, failed
        self._entries: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._wanted: set[str] = set()  # names of requests that have not ended, and that nobody cancelled
        self._kept = KeptCache(model)
        self._num_cached: dict[str, int] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="expertly-serve-generate", daemon=True)
        self._thread.start()

    def submit(self, entry: Entry) -> None:
        self._wanted.add(entry.name)
        self._entries.put(entry)

    def cancel(self, name: str) -> None:
        self._wanted.discard(name)
        self._num_cached.pop(name, None)

    def num_cached(self, name: str) -> int:
        return self._num_cached.pop(name, 0)

    def free_share(self) -> float:
        return 1.0  # it is the running request's

    def num_preempted(self) -> int:
        return 0

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._is_closed = True
        self._entries.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (entry := self._entries.get()) is not None and not self._is_closed:
            try:
                if entry.name in self._wanted:
                    self._generate(entry)
            except Exception as error:  # of any kind: this request fails
                self._num_cached.pop(entry.name, None)
                if entry.name in self._wanted:
                    self._failed([entry.name], [], error)
            self._model._expertly_runtime.is_unwanted = lambda: False
            if entry.name not in self._wanted:  # nobody asks any more
                self._num_cached.pop(entry.name, None)
            self._wanted.discard(entry.name)

    def _generate(self, entry: Entry) -> None:
        def choose(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores = scores.float()
            return _force(scores, self._choose([entry.name], scores))

        def is_unwanted() -> bool:
            return self._is_closed or entry.name not in self._wanted

        def must_stop(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((input_ids.shape[0],), is_unwanted(), device=input_ids.device, dtype=torch.bool)

        config = _greedy_config(self._model, entry.max_new_tokens)
        config.eos_token_id = list(entry.end_tokens) or None
        config.return_dict_in_generate = True
        prompt = torch.tensor([list(entry.prompt)], device=self._model.device)
        cache, self._num_cached[entry.name] = self._kept.take(entry.prompt)
        self._model._expertly_runtime.is_unwanted = is_unwanted
        made = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=config,
            **{CACHE: cache},
            logits_processor=LogitsProcessorList([choose]),
            stopping_criteria=StoppingCriteriaList([must_stop]),
        )
        self._kept.keep(made)


# -- can a family share forward passes? --------------------------------------------------------------------------------

_PATIENCE_S = 600.0
_NUM_PROBED = 2  # tokens


def why_not_together(model: Any, page_tokens: int) -> str | None:
    """None if continuous batching can run this model, else the reason. Tries it with two tokens.

    Raises ExpertlyError where experts could not be loaded, which says nothing about the family.
    """
    events: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()  # of each token None, or what failed

    def choose(names: Sequence[str], logits: torch.Tensor) -> list[int | None]:
        events.put(None)
        return [None] * len(names)

    def failed(of_step: Sequence[str], waiting: Sequence[str], error: BaseException) -> None:
        events.put(error)

    error: BaseException | None = None
    try:
        batch = Batch(model, Limits(page_tokens, 4, page_tokens, 2), choose, failed)
        try:
            batch.submit(Entry("probe", [0, 1, 2], _NUM_PROBED, []))
            for _ in range(_NUM_PROBED):
                error = error or events.get(timeout=_PATIENCE_S)
        finally:
            batch.close()
    except queue.Empty:
        return f"it wrote no {_NUM_PROBED} tokens in {_PATIENCE_S:.0f} s"
    except Exception as raised:  # transformers raises anything for families that it does not support
        error = raised
    if isinstance(error, ExpertlyError):
        raise error
    if error is None:
        return None
    return f"transformers' continuous batching does not run it ({type(error).__name__}: {first_line(error):.200})"


# -- what users who call transformers' own batching may ask for --------------------------------------------------------


def bounded_config(config: Any, generation_config: Any = None) -> Any:
    """`config` without CUDA graphs and async batching. Raises ModelUseError where the caller asks for CUDA graphs or
    compilation, or leaves the cache's size open: transformers would take most of the machine's memory.
    """
    graphs = getattr(config, "use_cuda_graph", None)
    if any(graphs) if isinstance(graphs, tuple) else graphs:
        raise ModelUseError(f"use_cuda_graph={graphs}: experts that come and go cannot be captured; accepted: False")
    compiled = [getattr(config, name, None) for name in ("varlen_compile_config", "decode_compile_config")]
    compiled.append(getattr(generation_config, "compile_config", None))
    if getattr(config, "default_compile_level", None) or any(setting is not None for setting in compiled):
        raise ModelUseError("compile_config: experts that come and go cannot be traced; accepted: None")
    if config is None or None in (config.num_blocks, config.max_batch_tokens):
        raise ModelUseError("continuous_batching_config: accepted: one with num_blocks and max_batch_tokens")
    config = copy.copy(config)
    config.use_cuda_graph = config.use_async_batching = False
    return config
