"""Experiments of MoE-Infinity, a figure or a group of figures a file."""
