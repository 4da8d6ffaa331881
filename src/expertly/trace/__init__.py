"""Routing traces: what the control plane saw, on disk. Recorded, imported, made up; read as hostile input.

Imports core, the standard library and NumPy.
"""
