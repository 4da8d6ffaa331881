"""Predictors: which experts later layers will need. One predictor a file or folder; `PREDICTORS` has their classes by
name.
"""

from __future__ import annotations

from expertly.policies.predictor.base import Predictor
from expertly.policies.predictor.baselines import Index, RandomExperts
from expertly.policies.predictor.eam import EAM
from expertly.policies.predictor.fmoe import FMoE
from expertly.policies.predictor.learned import Learned
from expertly.policies.predictor.lookahead import Lookahead, Speculative
from expertly.policies.predictor.oracle import ModelledLookahead, Perfect
from expertly.policies.predictor.popularity import Counts, Popularity
from expertly.policies.predictor.token_id import TokenId
from expertly.policies.registry import PolicyRegistry

PREDICTORS: PolicyRegistry[Predictor] = PolicyRegistry(
    Predictor,
    "expertly.predictors",
    (
        Perfect,
        ModelledLookahead,
        Lookahead,
        Speculative,
        Counts,
        Popularity,
        TokenId,
        Index,
        RandomExperts,
        Learned,
        FMoE,
        EAM,
    ),
)

__all__ = ["PREDICTORS", "Predictor"]
