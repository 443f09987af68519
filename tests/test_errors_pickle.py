"""Ranks gather errors by pickle: type, fields and text survive it, once and again."""

import inspect
import pickle
import re

import pytest

from dcp_checkfreq import errors
from dcp_checkfreq.errors import CheckFreqError

KINDS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, CheckFreqError)
]
EXAMPLES = {
    "missing": ["a.b", "c"],
    "keys": ["a", "b"],
    "ranks": [[0, 1], [0, 3]],
    "differences": [("a.x[2]", [(0, "1"), (1, "'ä'")]), ("b", [])],
    "pairs": [f"k{n}" for n in range(9)],
    "is_state_touched": False,
}


def example(kind):
    """Return an error of this kind, made as the package makes it."""
    if kind is CheckFreqError:
        return CheckFreqError("any text")
    parameters = list(inspect.signature(kind).parameters)
    return kind(*[EXAMPLES.get(name, f"the {name}, ä\n'\"%s {{}}") for name in parameters])


def fields(error):
    return {name: value for name, value in vars(error).items() if not name.startswith("__")}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", [2, pickle.DEFAULT_PROTOCOL, pickle.HIGHEST_PROTOCOL])
def test_an_error_survives_pickle_twice(kind, protocol):
    error = example(kind)
    again = error
    for _ in range(2):
        again = pickle.loads(pickle.dumps(again, protocol=protocol))
        assert type(again) is kind
        assert str(again) == str(error)
        assert fields(again) == fields(error)
        assert again.args == error.args
        assert again.exit_code == error.exit_code


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_text_holds_every_field(kind):
    error = example(kind)
    text = str(error)
    assert text
    shown = [value for value in fields(error).values() if isinstance(value, str)]
    if kind in (errors.CheckpointExists, errors.ItemsMissing, errors.ReplicasDiffer,
                errors.DtypeDiffers):  # fmt: skip
        shown.remove(error.why)  # said at more length
    for value in shown:
        assert value in text or repr(value) in text


def test_exit_codes_are_their_own_and_fit_a_shell():
    codes = [kind.exit_code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert all(3 <= code < 126 for code in codes)
    assert all("exit_code" in vars(kind) for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_exit_code_stands_in_the_decade_of_its_parent(kind):
    parent = kind.__base__
    if parent not in (Exception, CheckFreqError):
        assert kind.exit_code // 10 == parent.exit_code // 10


def test_every_error_says_what_it_means_and_stands_in_the_tree_that_is_drawn():
    drawn = {
        match[2]: len(match[1]) // 4
        for match in re.finditer(
            r"^    ([ |]*(?:\|-- |`-- )?)([A-Z]\w+)", errors.__doc__, re.MULTILINE
        )
    }
    for kind in KINDS:
        assert kind.__doc__, kind
        assert kind.__name__ in drawn, f"{kind.__name__} is missing in the drawing"
        depth = sum(issubclass(base, CheckFreqError) for base in kind.__mro__) - 1
        assert drawn[kind.__name__] == depth
    assert set(drawn) == {kind.__name__ for kind in KINDS}


def test_a_long_list_of_keys_is_cut_in_the_text_but_not_in_the_fields():
    keys = [f"key{n}" for n in range(50)]
    for kind, name in ((errors.ItemsMissing, "missing"), (errors.ReplicasDiffer, "keys"),
                       (errors.DtypeDiffers, "pairs")):  # fmt: skip
        error = pickle.loads(pickle.dumps(kind("/runs", keys)))
        assert getattr(error, name) == tuple(keys)
        assert "key49" not in str(error)
        assert len(str(error)) < 400
