"""The commands of `expertly lab`: one file each, no logic."""
