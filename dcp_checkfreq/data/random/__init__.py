"""Random numbers that do not depend on who draws them and when.

`per_sample` gives each sample its own, `rng_state` saves those of a rank, `global_state` is the
process's, `generators` knows all kinds of generators.
"""
