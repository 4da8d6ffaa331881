"""MoE-Infinity: activation matrices of past requests predict (sections 4.3 to 4.5). `EAM` predicts; it learns
`Matrices`.
"""

from expertly.policies.predictor.eam.predictor import EAM, EAMOptions

__all__ = ["EAM", "EAMOptions"]
