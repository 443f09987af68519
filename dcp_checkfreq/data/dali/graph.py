"""The sources of a DALI graph: readers, external sources, random operators. All are accounted for.

DALI has no public list of a pipeline's operators. Where a version has none that can be read here,
only what `Pipeline.reader_meta` returns is checked.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

# Arguments of a reader that decide about its order, with DALI's defaults.
_ORDER_ARGUMENTS = {
    "random_shuffle": False,
    "initial_fill": 1024,
    "shuffle_after_epoch": False,
    "stick_to_shard": False,
}


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of a graph.

    Attributes:
        name: in the pipeline.
        kind: of operator, as ``readers.file``.
        arguments: that it was made with.
        callback: of an external source; None if it is fed by hand, or is none.
        is_random: draws random numbers.
        is_numbered: an external source whose function is given the number of the sample or batch,
            which DALI's checkpoint has.
    """

    name: str
    kind: str
    arguments: dict[str, Any]
    callback: Any
    is_random: bool
    is_numbered: bool

    @property
    def is_external(self) -> bool:
        """Whether Python code gives it its data."""
        return self.kind.endswith(("ExternalSource", "external_source"))

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


def operators_of(pipeline: Any) -> list[Operator]:
    """Return the operators of a pipeline that was built; none if DALI does not list them."""
    found = []
    for instance in getattr(pipeline, "_ops", None) or ():
        operator = getattr(instance, "_op", None)
        arguments = dict(getattr(operator, "_init_args", None) or {})
        schema = getattr(operator, "_schema", None)
        module = str(arguments.get("_module", "")).removeprefix("nvidia.dali.")
        shown = arguments.get("_display_name")
        kind = f"{module}.{shown}" if module and shown else type(operator).__name__
        is_reader = "reader" in kind.lower()
        described = getattr(operator, "_source_desc", None)
        found.append(
            Operator(
                name=str(getattr(instance, "name", "?")),
                kind=kind,
                arguments=arguments,
                callback=getattr(operator, "_callback", None),
                is_random=bool(schema is not None and schema.HasRandomSeedArg()) and not is_reader,
                is_numbered=getattr(getattr(described, "kind", None), "name", "") == "CALLABLE"
                and bool(getattr(described, "has_inputs", False)),
            )
        )
    return found


def check_readers(
    pipeline: Any,
    reader_name: str,
    *,
    rank: int,
    world_size: int,
    independent: Collection[str] = (),
    what: str,
) -> None:
    """Raise ValueError if a source would lose or repeat items, or drift away from the named reader.

    Args:
        pipeline: built.
        reader_name: ``name=`` of the reader that says how long an epoch is.
        rank: which shard all readers should read first.
        world_size: into how many shards they should cut their data.
        independent: readers of other data, which need not keep in step with the named one, and
            external sources that are functions of the number that DALI gives them.
        what: named in errors.
    """
    readers = pipeline.reader_meta()
    if reader_name not in readers:
        raise ValueError(f"{what}: there is no reader {reader_name!r}, only {sorted(readers)}")
    operators = operators_of(pipeline)
    external = {operator.name: operator for operator in operators if operator.is_external}
    others = (set(readers) | set(external)) - {reader_name}
    if unknown := sorted(set(independent) - others):
        raise ValueError(f"{what}: there are no other sources {unknown}, only {sorted(others)}")
    named = readers[reader_name]
    for name in (reader_name, *sorted(set(readers) - {reader_name})):
        meta = readers[name]
        if not meta["pad_last_batch"]:
            raise ValueError(
                f"{what}: reader {name!r} loses and repeats items from the second epoch on: "
                "give it pad_last_batch=True"
            )
        shards, shard = meta["number_of_shards"], meta["shard_id"]
        if (shard, shards) != (rank, world_size):
            raise ValueError(
                f"{what}: reader {name!r} reads shard {shard} of {shards}, this is rank {rank} "
                f"of {world_size}"
            )
        if name not in independent and meta["epoch_size"] != named["epoch_size"]:
            raise ValueError(
                f"{what}: reader {name!r} has {meta['epoch_size']} items, {reader_name!r} has "
                f"{named['epoch_size']}: they drift apart. If they are of other data, pass "
                f"independent=[{name!r}]"
            )
    _check_orders(operators, reader_name, set(readers) - set(independent), what)
    for name, operator in sorted(external.items()):
        if operator.is_numbered and name in independent:
            continue
        way_out = (
            f", or, if its function depends on nothing but the number that it is given, pass "
            f"independent=[{name!r}]" if operator.is_numbered else ""
        )  # fmt: skip
        raise ValueError(
            f"{what}: {operator} next to the reader is not part of DALI's checkpoint, so it would "
            "begin anew after a resume while the reader continues. Read what it gives with a "
            "reader, or use ResumableDALILoader, whose labels and random numbers are in step"
            f"{way_out}"
        )


def _check_orders(
    operators: list[Operator], reader_name: str, in_step: Collection[str], what: str
) -> None:
    by_name = {operator.name: operator for operator in operators if operator.name in in_step}
    named = by_name.get(reader_name)
    if named is None:
        return
    for name, other in sorted(by_name.items()):
        if name == reader_name:
            continue
        pairs = [
            (key, named.arguments.get(key, default), other.arguments.get(key, default))
            for key, default in _ORDER_ARGUMENTS.items()
        ]
        if named.arguments.get("random_shuffle"):
            # Without one each operator gets another seed from the pipeline.
            pairs.append(("seed", named.arguments.get("seed"), other.arguments.get("seed")))
        for key, wanted, found in pairs:
            if found != wanted or (key == "seed" and found in (None, -1)):
                raise ValueError(
                    f"{what}: reader {name!r} has {key}={found}, {reader_name!r} has "
                    f"{key}={wanted}: what they read does not belong together. Give both the same "
                    f"{key}, or pass independent=[{name!r}] if they are of other data"
                )


def check_fed(pipeline: Any, source: Any, *, what: str) -> None:
    """Raise ValueError if a pipeline has an external source besides ``source``."""
    external = [operator for operator in operators_of(pipeline) if operator.is_external]
    if not any(operator.callback is source for operator in external):
        return  # wrapped in a function, or this version of DALI does not list them
    for operator in external:
        if operator.callback is not source:
            raise ValueError(
                f"{what}: {operator} next to source.inputs() has an order of its own, and would "
                "begin anew after a resume. Make what it gives from the path, the label (an index "
                "into anything) or the random numbers of the sample"
            )


def random_operators(pipeline: Any) -> list[str]:
    """Return those that draw numbers of DALI's."""
    return [str(operator) for operator in operators_of(pipeline) if operator.is_random]
