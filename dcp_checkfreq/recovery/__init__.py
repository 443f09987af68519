"""Which checkpoint to resume from, and what dead attempts left behind.

`take_over` is how a run comes into a root. `scan` reads step folders into records, `plan` says what
they mean, `choose` applies it to a root.
`files` says which files make a checkpoint, `kept` whether those of a run are still there,
`retention` which may go, `clean` removes them and what dead attempts left. `lease` says who is at
work in a root, `root_id` which root it is, `root_check` whether all ranks see the same one, and
`root_watch` what others do in it.
"""
