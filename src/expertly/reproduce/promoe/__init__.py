"""Experiments of ProMoE, a figure or a group of figures a file."""
