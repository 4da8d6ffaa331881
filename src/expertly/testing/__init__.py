"""What a policy promises, as checks to run on your own (docs/extending.md); ours pass the same. Imports no engine."""

from __future__ import annotations

from expertly.testing.eviction import EVICTION_CHECKS, check_eviction
from expertly.testing.predictor import PREDICTOR_CHECKS, check_predictor

__all__ = ["EVICTION_CHECKS", "PREDICTOR_CHECKS", "check_eviction", "check_predictor"]
