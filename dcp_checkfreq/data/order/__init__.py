"""Which sample comes when, and where a job is in it. Rules, and the cursor that keeps to them.

`permutation` is the order of an epoch, `interleave` the order of data that lies in pieces,
`position` where a job is and what each rank takes next, `cursor` the position of one loader,
`ranks` which data-parallel rank this is.
"""
