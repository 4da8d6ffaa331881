"""Requests that come and go while a model runs, their tokens chosen by the caller: many in one forward pass through
transformers' manager of continuous batching, or one at a time through `generate`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from expertly.core.errors import EngineClosedError

_POLL_S = 0.2
"""How often a batch that delivers nothing is asked whether its thread still runs."""

_LAST_WORDS_S = 2.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a batch: tokens of one page of the cache, its pages, tokens and requests of one forward pass."""

    page_tokens: int
    num_pages: int
    max_batch_tokens: int
    max_requests: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One request as a model sees it. It ends after `max_new_tokens`, or behind one of `end_tokens`."""

    name: str
    prompt: Sequence[int]
    max_new_tokens: int
    end_tokens: Sequence[int]


class Chooser(Protocol):
    """Chooses tokens. Called in the thread that runs the model, once a forward pass."""

    def choose(self, names: Sequence[str], logits: torch.Tensor) -> Sequence[int | None]:
        """One token for each request from float32 logits [N, V]; None: the likeliest, which the model finds itself."""


Failed = Callable[[Sequence[str], Sequence[str], BaseException], None]
"""`failed(of_step, others, error)`: requests of the forward pass that failed, and those that were not in it. Called by
a thread of the batch, which runs none of them any more, and takes new ones.
"""


class Stepper(Protocol):
    """Runs requests, in threads of its own. Any thread may call."""

    def submit(self, entry: Entry) -> None:
        """It runs as soon as it can."""

    def cancel(self, name: str) -> None:
        """Not in the next forward pass but one. Unknown names are ignored."""

    def is_alive(self) -> bool:
        """False where nothing will ever run again."""

    def close(self) -> None:
        """End the threads; what still runs is dropped. Idempotent."""


def model_processors(model: Any) -> LogitsProcessorList:
    """What the model's own generation config does to logits when nothing is sampled: a repetition penalty, tokens that
    are suppressed. Sampling is the request's.
    """
    found: LogitsProcessorList = model._get_logits_processor(greedy_config(model, 1))
    return found


def greedy_config(model: Any, max_new_tokens: int) -> GenerationConfig:
    """The model's own, one sequence, nothing sampled."""
    config: GenerationConfig = copy.deepcopy(model.generation_config)
    config.max_length, config.max_new_tokens, config.min_length = None, max_new_tokens, None
    config.num_beams, config.num_return_sequences = 1, 1
    config.do_sample = False
    config.temperature = config.top_p = config.top_k = config.min_p = config.typical_p = None
    if config.pad_token_id is None:
        end = config.eos_token_id
        config.pad_token_id = end[0] if isinstance(end, list) else end
    return config


def end_tokens(model: Any) -> list[int]:
    """What ends a text, by the model's own generation config."""
    end = model.generation_config.eos_token_id
    if end is None:
        return []
    return [end] if isinstance(end, int) else list(end)


class _Choosing:
    """Stands where the manager has its logits processors: it is told who is in a pass, and gets the logits."""

    do_processing = True
    tensors_required = 0

    def __init__(self, chooser: Chooser, processors: LogitsProcessorList) -> None:
        self._chooser = chooser
        self._processors = processors
        self._in_pass: list[Any] = []

    @property
    def names(self) -> list[str]:
        """Of the requests of the pass that runs, or ran last."""
        return [future.state.request_id for future in self._in_pass]

    def clear_pass(self) -> None:
        self._in_pass = []

    # -- what the manager asks of its processors -----------------------------------------------------------------------

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """There is no argument to fill."""

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """There are none."""

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: torch.Tensor) -> torch.Tensor:
        self._in_pass = list(requests_in_batch)
        return arg_storage

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, args: torch.Tensor) -> torch.Tensor:
        """[N, V] whose largest of each row is the chosen one. Rows behind those that have a new token are padding."""
        states = [future.state for future in self._in_pass if future.has_new_token]
        if not states:
            return scores
        if self._processors:
            scores = scores.clone()
            for row, state in enumerate(states):
                so_far: Any = torch.tensor([[*state.initial_tokens, *state.generated_tokens]], device=scores.device)
                scores[row] = self._processors(so_far, scores[row : row + 1])[0]
        return _forced(scores, self._chooser.choose([state.request_id for state in states], scores[: len(states)]))


def _forced(scores: torch.Tensor, tokens: Sequence[int | None]) -> torch.Tensor:
    if all(token is None for token in tokens):
        return scores
    scores = scores.clone()
    for row, token in enumerate(tokens):
        if token is not None:
            scores[row] = -torch.inf
            scores[row, token] = 0.0
    return scores


class Batch:
    """See Stepper. Many requests in one forward pass. The caller admits no more than the cache holds.

    A pass that raises ends the manager and its cache; both are made anew before `failed` is called.
    """

    def __init__(self, model: Any, limits: Limits, chooser: Chooser, failed: Failed) -> None:
        self._model = model
        self._limits = limits
        self._failed = failed
        self._choosing = _Choosing(chooser, model_processors(model))
        self._lock = threading.Lock()
        self._running: dict[str, None] = {}
        self._is_closed = False
        self._manager = self._make()
        self._watcher = threading.Thread(target=self._watch, name="expertly-serve-batch", daemon=True)
        self._watcher.start()

    def submit(self, entry: Entry) -> None:
        """See Stepper."""
        with self._lock:
            self._running[entry.name] = None
            self._manager.add_request(
                list(entry.prompt),
                request_id=entry.name,
                max_new_tokens=entry.max_new_tokens,
                eos_token_id=list(entry.end_tokens) or -1,
            )

    def cancel(self, name: str) -> None:
        """See Stepper."""
        with self._lock:
            if name in self._running:
                del self._running[name]
                self._manager.cancel_request(name)

    def is_alive(self) -> bool:
        """See Stepper."""
        return self._watcher.is_alive()

    def close(self) -> None:
        """See Stepper."""
        self._is_closed = True
        with self._lock:
            if self._manager.is_running():
                self._manager.stop(block=True, timeout=60, hard_stop=True)
        if threading.current_thread() is not self._watcher:
            self._watcher.join()

    def _make(self) -> Any:
        page_field = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
        settings: Any = {page_field: self._limits.page_tokens}
        if hasattr(ContinuousBatchingConfig, "auto_switch_to_flash"):
            settings["auto_switch_to_flash"] = False  # it may fetch a kernel, and knows no float32
        config = ContinuousBatchingConfig(
            num_blocks=self._limits.num_pages,
            max_batch_tokens=self._limits.max_batch_tokens,
            max_requests_per_batch=self._limits.max_requests,
            use_cuda_graph=False,
            use_async_batching=False,
            **settings,
        )
        own = greedy_config(self._model, 1)
        own.eos_token_id = -1 if own.eos_token_id is None else own.eos_token_id  # each request brings its own
        manager = self._model.init_continuous_batching(own, config)
        manager.logit_processor = self._choosing
        manager.start()
        return manager

    def _watch(self) -> None:
        """Takes what the manager says has ended, and sees when it has failed."""
        while not self._is_closed:
            output = self._manager.get_result(timeout=_POLL_S)
            if output is not None and output.error is None:
                with self._lock:
                    self._running.pop(output.request_id, None)
                continue
            thread = self._manager._generation_thread
            if output is not None and thread is not None:
                thread.join(timeout=_LAST_WORDS_S)  # it fails all its requests before it ends
            if self._is_closed or (thread is not None and thread.is_alive()):
                if output is not None:
                    self._refused(output.request_id, output.error)
                continue
            self._recover()

    def _refused(self, name: str, reason: str) -> None:
        """One request alone; the manager goes on."""
        with self._lock:
            was_running = name in self._running
            self._running.pop(name, None)
        if was_running:
            self._failed([name], [], RuntimeError(reason))

    def _recover(self) -> None:
        error = self._manager.background_thread_status.fatal_error or RuntimeError("the batch's thread ended")
        with self._lock:
            if self._is_closed:
                return
            in_pass = set(self._choosing.names)
            of_step = [name for name in self._running if name in in_pass]
            others = [name for name in self._running if name not in in_pass]
            self._running.clear()
            self._choosing.clear_pass()
            try:
                self._manager.stop(block=True)
                self._manager = self._make()
            except Exception as raised:  # whatever it is, nothing runs any more: who waits is told
                self._is_closed = True
                others = []
                error = EngineClosedError(f"continuous batching could not be begun again: {raised}")
        self._failed(of_step, others, error)


class OneAtATime:
    """See Stepper. For families that cannot share a forward pass: each request is one call of `generate`."""

    def __init__(self, model: Any, chooser: Chooser, failed: Failed) -> None:
        self._model = model
        self._chooser = chooser
        self._failed = failed
        self._changed = threading.Condition()
        self._waiting: list[Entry] = []
        self._cancelled: set[str] = set()
        self._runs: str | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="expertly-serve-generate", daemon=True)
        self._thread.start()

    def submit(self, entry: Entry) -> None:
        """See Stepper."""
        with self._changed:
            self._waiting.append(entry)
            self._changed.notify()

    def cancel(self, name: str) -> None:
        """See Stepper."""
        with self._changed:
            self._waiting = [entry for entry in self._waiting if entry.name != name]
            if self._runs == name:
                self._cancelled.add(name)

    def is_alive(self) -> bool:
        """See Stepper."""
        return self._thread.is_alive()

    def close(self) -> None:
        """See Stepper."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                entry = self._waiting.pop(0)
                self._runs = entry.name
            error: BaseException | None = None
            try:
                self._generate(entry)
            except Exception as raised:  # whatever it is, it is this request's: the waiter is told
                error = raised
            with self._changed:
                self._runs = None
                is_cancelled = entry.name in self._cancelled
                self._cancelled.clear()
            if error is not None and not is_cancelled:
                self._failed([entry.name], [], error)

    def _generate(self, entry: Entry) -> None:
        config = greedy_config(self._model, entry.max_new_tokens)
        config.eos_token_id = list(entry.end_tokens) or None
        prompt = torch.tensor([list(entry.prompt)], device=self._model.device)
        self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=config,
            logits_processor=LogitsProcessorList([_ChoosingOne(self._chooser, entry.name)]),
            stopping_criteria=StoppingCriteriaList([_Until(lambda: self._must_stop(entry.name))]),
        )

    def _must_stop(self, name: str) -> bool:
        return self._is_closed or name in self._cancelled


class _ChoosingOne(LogitsProcessor):
    def __init__(self, chooser: Chooser, name: str) -> None:
        self._chooser = chooser
        self._name = name

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.float()
        return _forced(scores, self._chooser.choose([self._name], scores))


class _Until(StoppingCriteria):
    def __init__(self, must_stop: Callable[[], bool]) -> None:
        self._must_stop = must_stop

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._must_stop(), device=input_ids.device, dtype=torch.bool)
