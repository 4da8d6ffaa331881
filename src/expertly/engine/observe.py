"""What predictors see of a model that runs, and `Prefetching`, which joins them to an engine.

T rows without pads, E experts, K top-k, H hidden, D distances looked ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from expertly.core.errors import ConfigError
from expertly.core.geometry import LayerGeometry
from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, Floats, IterationInfo, Routed, Want, scores_of_choices
from expertly.engine.executor import Executor
from expertly.engine.shard import Choice
from expertly.model.hooks import saturated_half
from expertly.model.routers import HookedRouter, find_routers
from expertly.policies.known import Known
from expertly.policies.learned import LearnedState
from expertly.policies.prediction import Predictor, best_of_layers
from expertly.scheduler.systems import System

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

Embed = Callable[[npt.NDArray[np.int32]], torch.Tensor]
"""From token ids [T] to the model's input embeddings [T, H]."""

OF_ROUTERS: frozenset[Want] = frozenset({"scores", "inputs", "lookahead"})
"""Observations that need hooks on the routers."""


# -- what a forward pass shows -----------------------------------------------------------------------------------------


class RequestNumbers:
    """Gives each request a number of its own.

    A sequence in prefill is a new request. A sequence that decodes keeps the number it had in the pass before. It is
    recognised by its place in a batch of the same size, or in continuous batching, where sequences lie side by side, by
    its position: the one after its last. So is the next part of a prompt. A sequence that is not recognised is new.
    """

    def __init__(self) -> None:
        self._next = 0
        self._numbers: Ids = np.empty(0, np.int64)  # of the sequences of the last pass
        self._following: dict[int, list[int]] = {}  # position that would come next -> requests, in order

    def of_rows(self, info: IterationInfo) -> Ids:
        """The request of each row, [T]; those of pads mean nothing. Needs `info.sequences`. Call it once a pass."""
        assert info.sequences is not None, "the engine asks for them"
        sequences = info.sequences
        if info.starts is not None:
            return self._side_by_side(info, sequences, info.starts.tolist())
        num_sequences = int(sequences[-1]) + 1
        if info.phase == "prefill" or len(self._numbers) != num_sequences:
            self._numbers = np.arange(self._next, self._next + num_sequences)
            self._next += num_sequences
        return self._numbers[sequences]

    def _side_by_side(self, info: IterationInfo, sequences: npt.NDArray[np.int32], starts: list[int]) -> Ids:
        is_real = slice(None) if info.is_pad is None else ~info.is_pad
        lengths = np.bincount(sequences[is_real], minlength=len(starts))
        following: dict[int, list[int]] = {}
        numbers = np.full(len(starts), -1)
        for sequence, (start, length) in enumerate(zip(starts, lengths.tolist(), strict=True)):
            if not length:
                continue
            known = self._following.get(start) if start else None
            if known:
                numbers[sequence] = known.pop(0)
            else:
                numbers[sequence] = self._next
                self._next += 1
            following.setdefault(start + length, []).append(int(numbers[sequence]))
        self._numbers, self._following = numbers, following
        return numbers[sequences]


class CannotLookAheadError(ConfigError):
    """A predictor looks ahead, and a router of the model cannot be called with an earlier layer's hidden states."""


class Collector:
    """Collects what a predictor, or a recording, sees of a forward pass. Routers are hooked from `attach` to `detach`.

    `begin` and `routed` keep references, and copies of what the model may overwrite. The functions that they return
    compute the observation: call each once. Values are rounded to float16, as in a trace, so that a
    predictor sees the same whether the model runs or its trace is replayed.
    """

    def __init__(
        self,
        wants: Collection[Want],
        layers: Sequence[LayerGeometry],
        routers: Sequence[HookedRouter | None],
        embed: Embed,
        distance: int,
    ) -> None:
        """`routers`: the routers of all layers, where one of OF_ROUTERS is wanted; `distance`: layers to look ahead.
        Raises CannotLookAheadError where no router can look ahead, ConfigError where one does not show its inputs.
        """
        self._wants = frozenset(wants)
        self._layers = layers
        self._routers = routers if self._wants & OF_ROUTERS else ()
        self._embed = embed
        self._distance, self._most_experts = min(distance, len(layers) - 1), max(shape.num_experts for shape in layers)
        self._requests = RequestNumbers()
        self._info: IterationInfo | None = None
        self._is_real: Mask | None = None  # None: all rows are
        self._seen: dict[int, tuple[Any, ...]] = {}  # router input [T, H], logits [T, E]
        self._lookahead: dict[int, Floats | None] = {}  # [T, E] of the next router, where no more is wanted
        self._of_tokens: dict[int, torch.Tensor] = {}  # choices [V, K] where the router sees only token ids
        self.left_out: list[int] = []
        """Layers without predictions: their routers cannot be called with earlier hidden states."""
        if "lookahead" in self._wants:
            self._find_who_looks_ahead(routers)
        unseen = [layer for layer, router in enumerate(routers) if router is None]
        if "inputs" in self._wants and unseen:
            raise ConfigError(f"prediction: it needs the routers' inputs, which layers {unseen} do not show")

    def _find_who_looks_ahead(self, routers: Sequence[HookedRouter | None]) -> None:
        deaf = {layer for layer, router in enumerate(routers) if router is None or not router.can_look_ahead}
        if len(deaf) == len(routers):
            raise CannotLookAheadError(
                f"prediction: it looks ahead, but nothing can ask the routers of layers {sorted(deaf)} to do so"
            )
        for layer, router in enumerate(routers):
            if router is not None and router.of_tokens is not None:
                self._of_tokens[layer] = router.of_tokens
        self.left_out = sorted(deaf - self._of_tokens.keys())

    @property
    def is_open(self) -> bool:
        """Whether a pass runs that has rows other than pads."""
        return self._info is not None

    def attach(self) -> None:
        for router in self._routers:
            if router is not None:
                router.attach(self._router_ran)

    def detach(self) -> None:
        for router in self._routers:
            if router is not None:
                router.detach()

    def begin(self, info: IterationInfo) -> Callable[[], Began] | None:
        """A pass begins. None where all rows are pads."""
        self._seen, self._lookahead, self._info = {}, {}, None
        requests, is_real = self._requests.of_rows(info), None if info.is_pad is None else ~info.is_pad
        if is_real is not None and not is_real.any():
            return None
        self._info, self._is_real = info, is_real

        def began() -> Began:
            embedding = None
            if "embedding" in self._wants:
                if info.embeddings is not None:
                    embedding = _cut(info.embeddings, is_real)
                elif info.token_ids is not None:
                    with torch.no_grad():
                        embedding = saturated_half(self._embed(_cut(info.token_ids, is_real)))
            token_ids = info.token_ids if "token_ids" in self._wants else None
            choices = {}
            if info.token_ids is not None:
                tokens = torch.tensor(_cut(info.token_ids, is_real))
                choices = {layer: _read_only(table[tokens].numpy()) for layer, table in self._of_tokens.items()}
            return Began(
                _read_only(_cut(requests, is_real)),
                _read_only(_cut(info.is_prefill, is_real)),
                None if embedding is None else _read_only(embedding.astype(np.float32)),
                None if token_ids is None else _read_only(_cut(token_ids, is_real)),
                choices,
            )

        return began

    def routed(
        self, ran: RouterRan, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> Callable[[], Routed] | None:
        """A router has chosen experts [T, K] with weights [T, K]. None where nobody observes the pass, or the layer's
        rows are not those of the pass.
        """
        if ran.layer in self._lookahead:
            return self._routed_by_lookahead(ran, self._lookahead.pop(ran.layer))
        inputs, logits = self._seen.pop(ran.layer, (None, None))
        info, is_real, wants, layer = self._info, self._is_real, self._wants, ran.layer
        if info is None or len(top_k_index) != len(info.is_prefill):
            return None
        if logits is not None and len(logits) != len(top_k_index):
            inputs = logits = None

        def routed() -> Routed:
            experts = scores = router_inputs = lookahead = None
            if wants & {"experts", "scores"}:
                experts = _read_only(_cut(top_k_index.cpu().numpy(), is_real))
            if "scores" in wants:
                assert experts is not None
                router = self._routers[layer]
                if logits is None or router is None:  # only the router's choice is known
                    weights = _cut(saturated_half(top_k_weights.detach()), is_real).astype(np.float32)
                    scores = scores_of_choices(experts, weights, self._layers[layer].num_experts)
                else:
                    scores = _cut(router.normalised(logits).half().cpu().numpy(), is_real).astype(np.float32)
                _read_only(scores)
            if inputs is not None:
                rows = inputs if is_real is None else inputs[torch.from_numpy(is_real).to(inputs.device)]
                if "inputs" in wants:
                    router_inputs = _read_only(saturated_half(rows).astype(np.float32))
                if "lookahead" in wants:
                    lookahead = _read_only(self._look_ahead(layer, rows))
            return Routed(ran, experts, scores, lookahead, router_inputs)

        return routed

    def _routed_by_lookahead(self, ran: RouterRan, ahead: Floats | None) -> Callable[[], Routed] | None:
        is_real = self._is_real

        def routed() -> Routed:
            lookahead = None
            if ahead is not None:
                scores = _cut(ahead, is_real)[:, : self._most_experts]
                lookahead = np.zeros((len(scores), self._distance, self._most_experts), np.float32)
                lookahead[:, 0, : scores.shape[1]] = scores.astype(np.float16)
            return Routed(ran, lookahead=None if lookahead is None else _read_only(lookahead))

        return routed if self.is_open else None

    def note_lookahead(self, layer: int, ahead: Floats | None) -> None:
        """In place of the hook on the layer's router, where no more than the lookahead is wanted."""
        self._lookahead[layer] = ahead

    def end(self) -> None:
        self._seen, self._info = {}, None

    def has_lookahead(self, layer: int) -> bool:
        """Whether a program's step, which takes a softmax, asks the next router as `_look_ahead` does."""
        router, following = self._routers[layer], self._routers[layer + 1]
        if router is None or following is None or router.hidden_size != following.hidden_size:
            return False
        return following.can_look_ahead and following.scoring == "softmax"

    def _router_ran(self, layer: int, inputs: torch.Tensor, logits: torch.Tensor) -> None:
        kept = inputs.detach().clone() if self._wants & {"lookahead", "inputs"} else None
        self._seen[layer] = kept, logits.detach()

    def _look_ahead(self, layer: int, inputs: torch.Tensor) -> Floats:
        """Scores [T, D, E] of the routers of the next D layers for this layer's inputs; after the last layer the next
        token runs the first ones. 0 for layers of another hidden size.
        """
        lookahead = np.zeros((len(inputs), self._distance, self._most_experts), np.float32)
        for distance in range(1, self._distance + 1):
            router = self._routers[(layer + distance) % len(self._layers)]
            if router is not None and router.can_look_ahead and router.hidden_size == inputs.shape[-1]:
                scores = router.scores(inputs).cpu().numpy()
                lookahead[:, distance - 1, : scores.shape[-1]] = scores.astype(np.float16)
        return lookahead


def _cut(values: npt.NDArray[Any], is_real: Mask | None) -> npt.NDArray[Any]:
    return values if is_real is None else values[is_real]


def _read_only(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values.setflags(write=False)
    return values


# -- an engine that predicts -------------------------------------------------------------------------------------------


class Prefetching:
    """Tells a predictor's prefetcher of a model's forward passes."""

    def __init__(self, executor: Executor, predictor: Predictor, collector: Collector) -> None:
        self.predictor = predictor
        self.routed, self.note_lookahead, self.left_out = collector.routed, collector.note_lookahead, collector.left_out
        self._layers = executor.geometry.layers
        self._collector, self._prefetcher = collector, executor.shard.use_predictor(predictor)
        collector.attach()

    @property
    def error(self) -> Exception | None:
        """The predictor's exception."""
        return self._prefetcher.error

    @property
    def may_defer(self) -> bool:
        """Whether the predictor may be told of a layer of this pass after it ran, see `lookahead_width`."""
        return self.error is None and self._collector.is_open

    def lookahead_width(self, layer: int) -> int | None:
        """As Predictor.lookahead_width; None also where the model's steps cannot see what will be named."""
        num_named = self.predictor.lookahead_width(layer)
        return num_named if not num_named or self._collector.has_lookahead(layer) else None

    def deferred_predictions(self, choices: Sequence[Choice]) -> list[Prediction | None]:
        """What the predictor names after these layers of one token, which ran before it was told."""
        named: list[Prediction | None] = [None] * len(choices)
        by_width: dict[tuple[int, int], list[int]] = {}
        for number, (layer, *_, early) in enumerate(choices):
            if early is not None:
                shape = self._layers[layer + 1].num_experts, self.lookahead_width(layer) or 0
                by_width.setdefault(shape, []).append(number)
        for (num_experts, width), numbers in by_width.items():
            early = np.concatenate([choices[number][-1][:, :num_experts] for number in numbers])  # type: ignore[index]
            scores = early.astype(np.float16).astype(np.float32)
            layers = [choices[number][0] + 1 for number in numbers]
            for number, prediction in zip(numbers, best_of_layers(layers, scores, width), strict=True):
                named[number] = prediction
        return named

    def begin(self, info: IterationInfo) -> None:
        began = self._collector.begin(info)
        if began is not None:
            self._prefetcher.begin_iteration(began)

    def end(self, ok: bool) -> None:
        if self._collector.is_open:
            self._collector.end()
            self._prefetcher.end_iteration(ok)

    def close(self) -> None:
        self._collector.detach()


def make_prefetching(
    system: System,
    model: Any,
    executor: Executor,
    weights: LearnedState | None = None,
) -> Prefetching | None:
    """The system's predictor, connected to a loaded model; None where the system does not predict. `weights`: of a
    learned predictor.

    Where the predictor sees routers, one forward pass finds them; the engine does not count it. Raises
    CannotLookAheadError where no router can look ahead, ConfigError where the model does not show what the predictor
    must see or the weights are another model's.
    """
    geometry = executor.geometry
    predictor = system.predictor(geometry, Known(items=(weights,)))
    if predictor is None:
        return None
    routers: Sequence[HookedRouter | None] = (
        find_routers(model, geometry.layers) if predictor.wants & OF_ROUTERS else ()
    )
    if weights is not None and weights.hidden_size:
        width = max((router.hidden_size for router in routers if router is not None), default=0)
        if width != weights.hidden_size:
            raise ConfigError(
                f"predictor: its weights are for router inputs of {weights.hidden_size} numbers; "
                f"this model's have {width}"
            )
    collector = Collector(predictor.wants, geometry.layers, routers, embedder(model), system.distance)
    if collector.left_out:
        said = (
            "prediction: nothing can ask the routers of layers %s early: their experts are loaded when they are chosen"
        )
        logging.getLogger("expertly").warning(said, collector.left_out)
    return Prefetching(executor, predictor, collector)


def embedder(model: Any) -> Embed:
    """The model's input embedding as a function. It keeps the embedding alive, not the model."""
    module = model.get_input_embeddings()

    def embed(token_ids: npt.NDArray[np.int32]) -> torch.Tensor:
        embedded: torch.Tensor = module.forward(torch.from_numpy(token_ids.astype(np.int64)).to(module.weight.device))
        return embedded

    return embed
