"""For people who study caching and prefetching of experts: traces, the simulator, the papers' experiments, comparison,
baselines of other authors. Imports expertly, which imports nothing of it.
"""

__version__ = "0.1.0"
