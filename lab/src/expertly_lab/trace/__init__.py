"""Routing traces: what the scheduler saw, on disk. Recorded, imported or made up; read as hostile input.

Imports core, the standard library and NumPy.
"""
