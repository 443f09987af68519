"""Tensors and byte items to pieces of shard files, and back.

Saving: `codec` makes payloads of them, `assign` gives each a file and an offset, `layout` puts the
two together. Loading: `byte_spans` are the bytes of a box, `read_plan` makes few large reads of
them, `fetch` carries it out, `targets` take the bytes; with `shared_read` and `shared_read_plan`
one rank reads what several want. `boxes`, `coverage` and `self_described` say which part of a
tensor a rank holds, `nesting` what holds itself.
"""
