"""Names the experts that a token's id has chosen before (ProMoE, section 4)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import Began, Floats, History, Ids, Routed, Want
from expertly.policies.base import option
from expertly.policies.known import Known
from expertly.policies.prediction import ALL_LAYERS, WidthOptions, best_of_rows
from expertly_lab.baselines.fixed_distance import FixedDistancePredictor
from expertly_lab.baselines.popularity import Popular

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TokenIdOptions(WidthOptions):
    """Options of `token-id`."""

    capacity: int = option(
        8192, "token ids remembered; each takes 4 bytes an expert of the model", least=1, most=1 << 20
    )


class IdCounts:
    """How often the rows of each token id chose each expert. Of more than `capacity` ids the last seen are kept."""

    def __init__(self, geometry: Geometry, capacity: int) -> None:
        self._capacity = capacity
        self._firsts = [geometry.first_expert_id(layer) for layer in range(geometry.num_layers)]
        self._sizes = [layer.num_experts for layer in geometry.layers]
        self._slots: OrderedDict[int, int] = OrderedDict()  # of the ids, the one seen last at the end
        self._counts = np.zeros((capacity, geometry.num_experts), np.int32)  # pages take no memory until written to

    def __len__(self) -> int:
        return len(self._slots)

    def slots(self, token_ids: TokenIds) -> Ids:
        """The slots of the counts of these ids, [T]; -1 where an id has none."""
        return np.array([self._slots.get(token, -1) for token in token_ids.tolist()], np.int64)

    def shares(self, layer: int, slots: Ids) -> Floats:
        """Each expert's share of the choices of `slots` in a layer, [T, E]; 0 where there were none."""
        first = self._firsts[layer]
        counts = self._counts[slots, first : first + self._sizes[layer]].astype(np.float32)
        shares: Floats = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        return shares

    def add(self, token_ids: TokenIds, chosen: Mapping[int, Ids]) -> None:
        """Count rows that chose these experts of these layers, [T, K] each. Ids below 0 are no tokens; experts outside
        0..E-1 do not count.
        """
        self._see(token_ids)
        slots = self.slots(token_ids)
        for layer, experts in chosen.items():
            is_choice = (experts >= 0) & (experts < self._sizes[layer]) & (slots >= 0)[:, None]
            rows, places = np.nonzero(is_choice)
            np.add.at(self._counts, (slots[rows], self._firsts[layer] + experts[rows, places].astype(np.int64)), 1)

    def _see(self, token_ids: TokenIds) -> None:
        """Note that these ids were seen last; the oldest ids give their slots to new ones."""
        order = self._slots
        seen = list(dict.fromkeys(token for token in reversed(token_ids.tolist()) if token >= 0))[: self._capacity]
        seen.reverse()
        for token in seen:
            if token in order:
                order.move_to_end(token)
        for token in seen:
            if token in order:
                order.move_to_end(token)
                continue
            if len(order) < self._capacity:
                slot = len(order)
            else:  # none of `seen`: they are all behind it
                _, slot = order.popitem(last=False)
                self._counts[slot] = 0
            order[token] = slot


class TokenId(FixedDistancePredictor):
    """Names, for each row, the experts that its token's id chose most often in a layer; for an unknown id, the most
    popular ones. All is known when a pass begins. With a distance of all layers it predicts all of them then
    (iteration-wise, as in the paper), otherwise each layer when it is `distance` ahead. Scores are shares of the id's
    choices.

    It learns from a training part and from passes (our choice: the paper has an offline table), but only from passes
    that ended well and were seen whole.
    """

    name = "token-id"
    options = TokenIdOptions
    needs = ("token",)
    default_distance = ALL_LAYERS
    wants: frozenset[Want] = frozenset({"token_ids", "experts"})

    def __init__(self, geometry: Geometry, distance: int, options: TokenIdOptions, known: Known) -> None:
        super().__init__(geometry, distance, options, known)
        self._all_layers = range(geometry.num_layers)
        if distance >= geometry.num_layers:
            self._distance = geometry.num_layers  # the last layer, too, is named when a pass begins
        self._popular = Popular(geometry, known.popularity)
        self._counts = IdCounts(geometry, options.capacity)
        self._token_ids: TokenIds | None = None  # of the pass
        self._slots: Ids = np.zeros(0, np.int64)  # of the ids, each once; -1 where some are not known
        self._due = range(0)  # layers of the pass
        self._last = -1  # layer that has run
        self._chosen: dict[int, Ids] = {}  # by the layers that have run
        self._num_rows = self._num_known = 0

    def begin_iteration(self, began: Began) -> Iterable[Prediction]:
        self._due = self._all_layers if began.layers is None else began.layers
        self._chosen = {}
        self._last = -1
        self._token_ids = began.token_ids
        self._slots = np.full(1, -1)
        if began.token_ids is not None:
            token_ids, counts = np.unique(began.token_ids, return_counts=True)
            slots = self._counts.slots(token_ids)
            self._num_rows += len(began.token_ids)
            self._num_known += int(counts[slots >= 0].sum())
            self._slots = np.unique(slots)
        return super().begin_iteration(began)

    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        if routed.experts is not None:
            self._popular.saw(routed.layer, routed.experts)
        self._note(routed)
        return () if self._token_ids is None else super().router_ran(routed)

    def end_iteration(self, ok: bool) -> None:
        """Count the choices of the pass, if it ended well, every layer was seen, and the number of rows stayed the
        same.
        """
        token_ids, self._token_ids = self._token_ids, None
        if ok and token_ids is not None and list(self._chosen) == list(self._due):
            self._counts.add(token_ids, self._chosen)
        self._chosen = {}

    def learn(self, history: History) -> None:
        self._popular.learn(history.experts)
        if history.token_ids is not None:
            self._counts.add(history.token_ids, {layer: history.experts[:, layer] for layer in self._all_layers})

    def facts(self) -> dict[str, int | float | None]:
        """`token_ids` remembered; `known`: the share of rows whose id was, when their pass began."""
        known = self._num_known / self._num_rows if self._num_rows else None
        return {"token_ids": len(self._counts), "known": known}

    def _note(self, routed: Routed) -> None:
        """Keep the choices of the rows. A layer that does not follow the last one belongs to a pass whose beginning was
        left out, and so do rows in another number than at its beginning.
        """
        token_ids, experts = self._token_ids, routed.experts
        if token_ids is None:
            return
        if routed.layer <= self._last or (experts is not None and len(experts) != len(token_ids)):
            self._token_ids = None
            return
        self._last = routed.layer
        if experts is not None:
            self._chosen[routed.layer] = experts

    def _predict(self, layer: int, distance: int) -> Prediction | None:
        scores = self._counts.shares(layer, self._slots[self._slots >= 0])
        scores = scores[scores.any(axis=1)]
        if len(scores) < len(self._slots) and (popular := self._popular.shares(layer)) is not None:
            scores = np.concatenate([scores, popular[None]])
        width = self._width or self._layers[layer].top_k
        return best_of_rows(layer, distance, scores, width) if len(scores) else None
