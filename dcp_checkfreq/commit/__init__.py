"""The commit: what makes a checkpoint exist.

`attempt` is one rank's attempt to save and `phases` its life as a table. `assemble` makes the
content of `.metadata` from the reports of all ranks, `publish` creates it, `standing` looks at what
stands there already. `one_at_a_time` and `in_flight` keep saves through one writer apart.
"""
