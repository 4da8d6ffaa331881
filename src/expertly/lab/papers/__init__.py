"""The papers' experiments: a file a paper; `findings` has the rules, `runs` where they run, `metrics` what is measured,
`runner` runs and reports them.
"""

TOKENS = 5000
"""Decoded tokens that are simulated, over all seeds; all that there are, where it is fewer."""
SEEDS = 3
"""Each parts the requests anew into those that are learned from and those that are simulated."""
