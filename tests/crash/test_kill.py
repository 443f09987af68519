"""A saving process really dies by SIGKILL at each of its calls to the disk; a new one goes on."""

import itertools
import shutil

import pytest
from crash_saves import load, newest, same_values, save, state_of
from killed import KILLED, killer

from dcp_checkfreq.storage.local.tier import LocalTier

pytestmark = pytest.mark.crash


@pytest.fixture(scope="module")
def child():
    with killer("kill_child.py") as carry_out:

        def save_and_die(root, step, n, when, *, overwrite=False):
            return carry_out(f"{n} {when} {int(overwrite)} {step} {root}")

        yield save_and_die


@pytest.fixture
def seeded(tmp_path):
    """A real folder with a whole step 1, copied afresh for each kill."""
    save(LocalTier(tmp_path / "seed"), 1)

    def copy(n):
        return shutil.copytree(tmp_path / "seed", tmp_path / f"run {n}")

    return copy


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_at_any_call_leaves_the_old_step_or_the_new_one(child, seeded, when):
    found = {}
    for n in itertools.count():
        path = seeded(n)
        code, moment = child(path, 2, n, when)
        root = LocalTier(path)
        if code != KILLED:
            assert code == 0
            assert newest(root, depth="digest") == 2
            break
        newest_step = newest(root)
        assert newest_step in (1, 2), moment
        assert same_values(load(root, 1), state_of(1))
        found[n, moment] = newest_step
        # The leftovers are in nobody's way.
        if newest_step == 1:
            save(root, 2)
        save(root, 3)
        assert newest(root, depth="digest") == 3
        assert same_values(load(root, 2), state_of(2))
    by_moment = {moment: step for (_, moment), step in found.items() if "link" in moment}
    assert by_moment[f"{when} os.link"] == (1 if when == "before" else 2)
    assert len(found) >= 10, found
    print(*found.items(), sep="\n")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_at_any_call_of_an_overwrite_leaves_all_old_or_all_new_values(child, seeded, when):
    seen = []
    for n in itertools.count():
        path = seeded(n)
        code, moment = child(path, 2, n, when, overwrite=True)
        got = load(LocalTier(path), 1)
        old, new = (same_values(got, state_of(step)) for step in (1, 2))
        if code != KILLED:
            assert code == 0
            assert new
            break
        assert old or new, moment
        seen.append("new" if new else "old")
    assert seen == sorted(seen, reverse=True), "once new, it stays new"
    assert {"old", "new"} == set(seen)
