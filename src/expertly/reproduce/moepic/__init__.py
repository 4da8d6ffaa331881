"""Experiments of MoEpic, a figure or a group of figures a file."""
