"""MoE-Infinity: activation matrices of past requests predict (sections 4.3 to 4.5). `EAM` is the door; `Matrices` are
what it learns.
"""

from expertly.policies.predictor.eam.predictor import EAM, EAMOptions

__all__ = ["EAM", "EAMOptions"]
