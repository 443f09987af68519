"""A folder behind an fsspec URL as a tier.

`tier` is the tier. `fsspec_files` and `s3_files` are the objects below it, `fsspec_calls` tries
each call again, `obstore_transfer` moves bytes to and from S3 without the GIL, `parts` cuts
uploads, `options` keeps secrets apart, `errors` says what a client's error means.
"""
