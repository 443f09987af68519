"""The command ``dcp-checkfreq``.

`app` is its commands, and how errors end it. `looks` finds out what a root holds, `summary` what a
checkpoint holds: neither needs torch, so that they answer at once. `shows` prints both.
"""
