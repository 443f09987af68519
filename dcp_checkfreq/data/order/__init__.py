"""Which sample comes when, and where a job is in it: rules, and the cursor that keeps to them.

`permutation` is the order of an epoch, `interleave` that of data in pieces, `epoch_orders` keeps
the orders of the epochs that a loader is in. `position` is where a job is and what each rank takes
next, `saved_position` the same as JSON, `cursor` the position of one loader, `turns` which of its
iterators may hand out. `options` are the options that loaders share, `ranks` says which
data-parallel rank this is.
"""
