"""The algorithms that can be swapped, one a file. Pure; imports core only."""
