"""What the bytes on storage mean. `docs/format.md` is this package in prose.

`names` are all names on storage, `index` the record in `.metadata`, `digest` the digests of
payloads, `envelope` the bytes of `torch.save` around one. `metadata` makes bytes of DCP's metadata
and back. `sealed` reads them: `stand_ins` unpickles without code, `stand_in_fields` looks into what
that makes, `build` checks every part, and makes it of the classes of `dcp_forms`, or of the plain
ones of `forms`, without torch. `safe_bytes` does the same for byte items, after `opcodes`,
`item_checks` and `numpy_checks` have looked; `value_checks` refuses at the save what they would
refuse. `checked_json` is a small record as text, `texts` shows values in messages, `torch_private`
has the names that torch does not promise to keep.
"""
