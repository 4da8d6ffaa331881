"""Expert maps of past iterations (fMoE, section 4): the store, the search over it, the choice of experts.

Imports core only.
"""

from expertly.policies.maps.store import MapShape, MapStore

__all__ = ["MapShape", "MapStore"]
