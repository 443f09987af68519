"""Imports point down the levels, rules stay pure; time, ranks, private names have one home."""

import ast
import pathlib
import sys

import pytest

import dcp_checkfreq

PACKAGE = pathlib.Path(dcp_checkfreq.__file__).parent

# The first entry that fits a module's path counts. A folder stands for all that is in it.
LEVELS = {
    "errors": 0,
    "crew": 0,
    "clock": 0,
    "garbage": 0,
    "version": 0,
    "options": 1,
    "format/names": 1,
    "format/index": 1,
    "shards/coverage": 1,
    "format/opcodes": 1,
    "format/texts": 0,
    "format/item_checks": 1,
    "format/numpy_checks": 1,
    "format/digest": 1,
    "policy": 1,
    "told": 1,
    "publish/phases": 1,
    "recovery/plan": 1,
    "shards/assign": 1,
    "shards/slices": 1,
    "shards/read_plan": 1,
    "storage/remote_parts": 1,
    "shards/share_plan": 1,
    "data/eviction": 1,
    "data/lanes": 1,
    "data/order": 1,
    "data/position": 1,
    "data/trail": 1,
    "data/flocks": 2,
    "outcome": 2,
    "leaving": 2,
    "storage": 2,
    "format": 2,
    "shards": 2,
    "publish": 3,
    "recovery": 3,
    "snapshot": 3,
    "gate": 3,
    "step_times": 3,
    "testing": 3,  # public test tools: may use all that is below the writer and reader
    "staged_save": 3,
    "rollcall": 2,
    "watchdog": 2,
    "patience": 2,
    "one_call": 2,
    "boundary": 3,
    "elastic": 3,
    "agreement": 3,
    "sharing": 4,
    "writer": 4,
    "reader": 4,
    "planner": 4,
    "holders": 0,
    "switching": 0,
    "state": 3,
    "held_optimizers": 2,
    "wanted_planner": 4,
    "loading": 5,
    "registered": 5,
    "save_record": 3,
    "covered": 3,
    "data": 4,
    "latest": 5,
    "signals": 3,
    "preemption": 5,
    "stopping": 5,
    "dropped": 5,
    "uploading": 5,
    "local_copies": 5,
    "root_check": 5,
    "saving": 5,
    "own_steps": 5,
    "pacing": 5,
    "restoring": 5,
    "checkpointer": 5,
}

# Rules: values in, values out. No clock, file, thread, rank or torch.
PURE = {
    "errors",
    "options",
    "format/names",
    "format/index",
    "format/opcodes",
    "format/texts",
    "format/item_checks",
    "format/numpy_checks",
    "format/digest",
    "policy/baseline",
    "policy/costs",
    "policy/interval",
    "policy/judged",
    "policy/needs",
    "policy/profile",
    "policy/retention",
    "policy/seen",
    "policy/tuner",
    "publish/phases",
    "recovery/plan",
    "shards/assign",
    "shards/slices",
    "shards/coverage",
    "shards/read_plan",
    "storage/remote_parts",
    "shards/share_plan",
    "data/eviction",
    "data/lanes",
    "data/order",
    "data/position",
    "data/trail",
    "told",
}
IMPURE_STDLIB = {
    "asyncio", "concurrent", "ctypes", "io", "logging", "mmap", "multiprocessing", "os", "pathlib",
    "random", "shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time",
}  # fmt: skip
ALLOWED_IN_PURE = {"format/digest": {"xxhash"}, "data/order": {"numpy"}}

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


def tree_of(name):
    return ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))


def imports_of(name):
    """Yield every imported thing of a module by its full dotted name."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import hides its level"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports_of(name):
    """Yield the modules of this package that a module imports, as paths."""
    for full in imports_of(name):
        parts = full.split(".")
        if parts[0] != PACKAGE.name:
            continue
        inner = "/".join(parts[1:])
        while inner and inner not in MODULES and f"{inner}/__init__" not in MODULES:
            inner = inner.rpartition("/")[0]  # the last part was a name in the module
        yield inner


def level_of(name):
    """Return the level of a module, or None for one that the table does not know."""
    for known, level in LEVELS.items():
        if name == known or name.startswith(f"{known}/"):
            return level
    return None


def is_facade(name):
    return name.endswith("__init__")


@pytest.mark.parametrize("name", [n for n in MODULES if not is_facade(n)])
def test_every_module_has_a_level_and_imports_point_down_or_sideways(name):
    level = level_of(name)
    assert level is not None, f"{name} is not in the table of this test: give it a level"
    for imported in own_imports_of(name):
        below = level_of(imported)
        assert below is not None, f"{name} imports {imported or 'the package itself'}"
        assert below <= level, f"{name} (level {level}) imports {imported} (level {below})"


@pytest.mark.parametrize("name", [n for n in MODULES if not n.startswith("testing/")])
def test_the_product_does_not_import_its_test_tools(name):
    assert not any(imported.split("/")[0] == "testing" for imported in own_imports_of(name))


@pytest.mark.parametrize("name", [n for n in MODULES if is_facade(n)])
def test_a_package_file_only_names_what_is_in_it(name):
    for node in tree_of(name).body:
        assert not isinstance(node, (ast.For, ast.While, ast.With, ast.Try, ast.ClassDef))
    if name not in ("__init__", "testing/__init__", "data/__init__"):
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


def test_only_rules_are_on_level_1():
    assert {name for name in MODULES if level_of(name) == 1 and not is_facade(name)} <= PURE


@pytest.mark.parametrize("name", [n for n in MODULES if n != "clock"])
def test_only_the_clock_reads_the_time(name):
    assert not {full.split(".")[0] for full in imports_of(name)} & TIME_MODULES
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Attribute) and node.attr in ("now", "utcnow", "today"):
            pytest.fail(f"{name}:{node.lineno} asks for the time")


# `elastic` makes the process group, and uses nothing of it.
@pytest.mark.parametrize("name", [n for n in MODULES if n not in ("agreement", "elastic")])
def test_only_agreement_uses_collectives(name):
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
    for known in LEVELS:
        assert any(name == known or name.startswith(f"{known}/") for name in MODULES), known
    assert set(MODULES) >= PURE
    assert set(MODULES) >= set(KNOWN_PRIVATE)
