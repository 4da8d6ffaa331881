"""MoEpic's speculative prefetcher (section 3.2, equation 3): all experts in the order of their scores."""

from __future__ import annotations

from dataclasses import dataclass, replace

from expertly.core.geometry import Geometry
from expertly.policies.predictor.lookahead import Lookahead, LookaheadOptions


@dataclass(frozen=True, slots=True)
class SpeculativeOptions(LookaheadOptions):
    """Options of `speculative`; its `width` is all experts, for as long as there are time and room, unless said."""

    next_token: bool = True


class Speculative(Lookahead):
    """A lookahead that names every expert of a layer, so that loading goes down the scores, past the K that the router
    will choose, until it has chosen; and that knows the first layer from the last one of the token before.
    """

    def __init__(
        self,
        geometry: Geometry,
        distance: int = 1,
        options: SpeculativeOptions = SpeculativeOptions(),
    ) -> None:
        most = max(layer.num_experts for layer in geometry.layers)
        super().__init__(geometry, distance, replace(options, width=options.width or most))
