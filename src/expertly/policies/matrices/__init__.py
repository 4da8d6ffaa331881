"""Expert activation matrices of past requests (MoE-Infinity, sections 4.3 to 4.5): the collections, and the match.

Imports core and policies.maps only.
"""

from expertly.policies.matrices.collection import Collection, Matrices

__all__ = ["Collection", "Matrices"]
