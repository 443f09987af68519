"""Imports point down the levels, rules stay pure; time, ranks, private names have one home."""

import ast
import functools
import pathlib
import sys

import pytest

import dcp_checkfreq

PACKAGE = pathlib.Path(dcp_checkfreq.__file__).parent

# A folder imports from folders below its level, never from one beside it. What lies in no folder
# has a row of its own.
LEVELS = {
    "errors": 0,
    "runtime": 1,
    "elastic": 2,
    "format": 2,
    "storage": 3,
    "ranks": 4,
    "testing": 4,
    "policy": 5,
    "shards": 5,
    "recovery": 6,
    "state": 6,
    "commit": 7,
    "snapshot": 7,
    "data": 8,
    "staging": 8,
    "dcp": 9,
    "checkpointer": 10,
    "dropin": 10,
    "opened": 10,
    "convert": 11,
    "integrations": 11,
    "cli": 12,
    "__main__": 13,
}

# Rules: values in, values out. No clock, file, thread, rank or torch.
PURE = {
    "errors",
    "format/checked_json",
    "format/names",
    "format/forms",
    "format/index",
    "format/opcodes",
    "format/texts",
    "format/item_checks",
    "format/numpy_checks",
    "format/digest",
    "checkpointer/memory_forecast",
    "policy/baseline",
    "policy/constants",
    "policy/costs",
    "policy/interval",
    "policy/save_cost",
    "policy/save_timings",
    "policy/stored_profile",
    "recovery/retention",
    "policy/observation",
    "policy/tuner",
    "commit/phases",
    "opened/picked",
    "convert/blocks",
    "convert/safetensors_layout",
    "recovery/plan",
    "shards/assign",
    "shards/byte_spans",
    "shards/coverage",
    "shards/read_plan",
    "storage/object_store/parts",
    "shards/shared_read_plan",
    "data/cache/eviction",
    "data/order/interleave",
    "data/order/permutation",
    "data/order/position",
    "data/order/saved_position",
    "data/order/turns",
    "data/wrap/trail",
    "runtime/options",
    "runtime/error_reports",
}
IMPURE_STDLIB = {
    "asyncio", "concurrent", "ctypes", "io", "logging", "mmap", "multiprocessing", "os", "pathlib",
    "random", "shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time",
}  # fmt: skip
ALLOWED_IN_PURE = {"format/digest": {"xxhash"}, "data/order/permutation": {"numpy"}}

TIME_MODULES = {"time", "timeit"}

# Parts of torch.distributed that are types and DCP's own functions, not collectives.
NO_COLLECTIVES = (
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.distributed.fsdp.FullyShardedDataParallel",  # to know it by
    # who this process is; nobody else has to answer
    "torch.distributed.is_available",
    "torch.distributed.is_initialized",
    "torch.distributed.get_rank",
    "torch.distributed.get_world_size",
)

# Private torch names outside of format/torch_private.py, each with the reason. Keep it empty.
KNOWN_PRIVATE: dict[str, set[str]] = {}


def module_names():
    """Yield every module as its path in the package without ``.py``; packages by their folder."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).with_suffix("").as_posix()


MODULES = list(module_names())


@functools.cache
def tree_of(name):
    return parsed(name)


def parsed(name):
    return ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))


class WithoutTypes(ast.NodeTransformer):
    """Drops what is there for type checkers only."""

    def visit_If(self, node):
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def imports_of(name, at_run_time=False):
    """Yield every imported thing of a module by its full dotted name.

    At run time: without what is imported for types only.
    """
    tree = WithoutTypes().visit(parsed(name)) if at_run_time else tree_of(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import hides its level"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports_of(name, at_run_time=False):
    """Yield the modules of this package that a module imports, as paths."""
    for full in imports_of(name, at_run_time):
        parts = full.split(".")
        if parts[0] != PACKAGE.name:
            continue
        inner = "/".join(parts[1:])
        while inner and inner not in MODULES and f"{inner}/__init__" not in MODULES:
            inner = inner.rpartition("/")[0]  # the last part was a name in the module
        yield inner


def folder_of(name):
    """Return the folder of the package that a module is in; of a module in none, the module."""
    return name.partition("/")[0]


def level_of(name):
    """Return the level of a module, or None for one that the table does not know."""
    return LEVELS.get(folder_of(name))


def is_facade(name):
    return name.endswith("__init__")


@pytest.mark.parametrize("name", [n for n in MODULES if not is_facade(n)])
def test_every_module_has_a_level_and_imports_point_down_or_stay_in_its_folder(name):
    level = level_of(name)
    assert level is not None, f"{name} is not in the table of this test: give its folder a level"
    for imported in own_imports_of(name):
        if folder_of(imported) != folder_of(name):
            below = level_of(imported)
            assert below is not None, f"{name} imports {imported or 'the package itself'}"
            assert below < level, f"{name} (level {level}) imports {imported} (level {below})"


@pytest.mark.slow
def test_no_module_imports_itself_in_a_circle():
    waits_for = {name: set(own_imports_of(name, at_run_time=True)) for name in MODULES}
    while free := {name for name, others in waits_for.items() if not others & set(waits_for)}:
        for name in free:
            del waits_for[name]
    assert not waits_for, "these import each other, or what does"


def test_few_modules_are_in_no_folder():
    assert len([name for name in MODULES if "/" not in name]) <= 4


@pytest.mark.parametrize("name", [n for n in MODULES if not n.startswith("testing/")])
def test_the_product_does_not_import_its_test_tools(name):
    assert not any(imported.split("/")[0] == "testing" for imported in own_imports_of(name))


@pytest.mark.parametrize("name", [n for n in MODULES if is_facade(n)])
def test_a_package_file_only_names_what_is_in_it(name):
    for node in tree_of(name).body:
        assert not isinstance(node, (ast.For, ast.While, ast.With, ast.Try, ast.ClassDef))
    if name not in ("__init__", "testing/__init__", "data/__init__", "dropin/__init__"):
        assert not list(imports_of(name))


@pytest.mark.parametrize("name", sorted(PURE))
def test_a_rule_imports_only_plain_standard_library_and_other_rules(name):
    for full in imports_of(name):
        top = full.split(".")[0]
        if top == PACKAGE.name:
            continue
        if top in ALLOWED_IN_PURE.get(name, ()):
            continue
        assert top in sys.stdlib_module_names, f"{name} imports {full}"
        assert top not in IMPURE_STDLIB, f"{name} imports {full}"
    for imported in own_imports_of(name):
        assert imported in PURE, f"{name} imports {imported}, which is no rule"


@pytest.mark.parametrize("name", sorted(PURE))
def test_a_rule_calls_nothing_that_looks_outside(name):
    called = {
        node.func.id
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"open", "print", "input", "exec", "eval", "__import__"}


@pytest.mark.parametrize("name", [n for n in MODULES if n != "runtime/clock"])
def test_only_the_clock_reads_the_time(name):
    assert not {full.split(".")[0] for full in imports_of(name)} & TIME_MODULES
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Attribute) and node.attr in ("now", "utcnow", "today"):
            pytest.fail(f"{name}:{node.lineno} asks for the time")


# These make and end process groups, and use nothing of them.
MAKES_GROUPS = ("ranks/own_group", "elastic")


@pytest.mark.parametrize(
    "name", [n for n in MODULES if n not in ("ranks/collectives", *MAKES_GROUPS)]
)
def test_only_one_module_uses_collectives(name):
    for full in imports_of(name):
        if full == "torch.distributed" or full.startswith("torch.distributed."):
            rest = full.startswith(NO_COLLECTIVES) or _is_private(full)  # private: the next test
            assert rest, f"{name} imports {full}"
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted.startswith("torch.distributed."):
                assert dotted.startswith(NO_COLLECTIVES), f"{name}:{node.lineno} uses {dotted}"


def _is_private(full):
    return any(part.startswith("_") and not part.startswith("__") for part in full.split("."))


@pytest.mark.parametrize("name", [n for n in MODULES if n != "format/torch_private"])
def test_only_one_module_names_what_torch_keeps_private(name):
    found = {full for full in imports_of(name) if full.startswith("torch") and _is_private(full)}
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted.startswith(("torch.", "dcp.", "dist.")) and _is_private(dotted):
                found.add(dotted)
    assert found <= KNOWN_PRIVATE.get(name, set())


def test_the_tables_name_only_what_is_there():
    assert set(LEVELS) == {folder_of(name) for name in MODULES} - {"__init__"}
    assert set(MODULES) >= PURE
    assert set(MODULES) >= set(KNOWN_PRIVATE)
