"""The copy of the live state that is written while training goes on.

`inventory` finds the tensors of a state, `pool` has memory for them, `copy_plan` says what goes
where, `stager` makes the copy. `background_copy` copies while training computes: `memcpy` and
`reads` move the bytes, `samples` notice changes, `optimizer_guard` makes the next update wait.
"""
