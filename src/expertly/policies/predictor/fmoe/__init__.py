"""fMoE: expert maps of past iterations predict (sections 4.1 to 4.4). `FMoE` predicts; it learns a `MapStore`."""

from expertly.policies.predictor.fmoe.predictor import FMoE, FMoEOptions

__all__ = ["FMoE", "FMoEOptions"]
