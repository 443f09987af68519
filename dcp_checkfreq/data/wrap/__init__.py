"""`ResumableIterator`: makes a loader of any other kind resume.

`iterator` is the wrapper and `saved` the state that it saves; `suited` says which loaders can be
wrapped. `order_sources` finds the generators and samplers that decide a loader's order, `made`
describes what makes its batches. `content` digests a batch, `trail` keeps the digests of an epoch,
and `handed_out` compares a replay with them.
"""
