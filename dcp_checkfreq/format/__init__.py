"""What the bytes on storage mean. `docs/format.md` is this package in prose."""
