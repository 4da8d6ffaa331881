"""Products of few tokens with matrices in memory: C, and its one Python wrapper. Imports core and torch."""
