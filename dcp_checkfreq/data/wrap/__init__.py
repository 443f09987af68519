"""`ResumableIterator`: makes a loader of any other kind resume.

`iterator` is the wrapper and `saved` the state that it saves. `order_sources` finds the generators
and samplers that decide the loader's order, `made` describes what makes its batches, `content`
digests a batch, and `trail` keeps those digests and compares a replay with them.
"""
