"""Experiments of fMoE, a figure or a group of figures a file."""
