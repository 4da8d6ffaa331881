"""The papers' experiments: a file a paper; `findings` has the rules, `runs` where they run, `metrics` what is measured,
`runner` runs and reports them.
"""
