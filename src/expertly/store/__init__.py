"""Bytes on disk: checkpoints as they come, and the packed store that experts are read from.

Imports core, the standard library, NumPy and xxhash; neither torch nor transformers.
"""
