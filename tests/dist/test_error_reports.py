"""Errors cross ranks as plain data, whatever they are."""

import pickle
import threading

import pytest

from dcp_checkfreq import errors
from dcp_checkfreq.errors import BrokenShard, DtypeDiffers, RankFailed, ReplicasDiffer, SaveFailed
from dcp_checkfreq.runtime.error_reports import (
    is_plain,
    report_of,
    survives_pickle,
    text_of,
)


class Ours(SaveFailed):
    """Somebody else's subclass: another process may not know it."""


class Named:
    BrokenShard = type("BrokenShard", (Exception,), {})  # a foreign class of the same name


def holding(error, **attributes):
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


FOREIGN = [
    ValueError("boom"),
    holding(ValueError("boom"), lock=threading.Lock()),
    KeyboardInterrupt("boom"),
    Ours("there", "boom"),
    SaveFailed("there", object()),  # a field that is no plain data
    Named.BrokenShard("boom"),
    OSError(28, "boom"),
]


@pytest.mark.parametrize("error", FOREIGN, ids=lambda error: type(error).__name__)
def test_a_foreign_error_crosses_as_text_with_the_rank(error):
    report = pickle.loads(pickle.dumps(report_of(error, 3, "saving")))
    again = report.rebuilt()
    assert type(again) is RankFailed
    assert str(again).startswith("rank 3 failed while saving: ")
    wrapped = report_of(error, 3, "saving", lambda text: SaveFailed("step 7", text)).rebuilt()
    assert type(wrapped) is SaveFailed
    assert "rank 3, while saving: " in str(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        BrokenShard("there", "cut"),
        DtypeDiffers("there", ["a: f32, f16"]),
        SaveFailed("there", "boom"),
        errors.UnsupportedState("key", "lock", "no"),
        errors.SnapshotFailed("no memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_this_package_keeps_its_class_and_names_the_rank(error):
    again = pickle.loads(pickle.dumps(report_of(error, 3, "saving"))).rebuilt()
    assert type(again) is type(error)
    assert "rank 3" in str(again)
    assert "rank 3" not in str(report_of(error, 3, "saving", named=False).rebuilt())
    twice = report_of(again, 3, "saving").rebuilt()
    assert str(twice).count("rank 3") == str(again).count("rank 3") or type(error) is DtypeDiffers


def test_what_is_of_no_one_rank_stays_as_it_is():
    error = ReplicasDiffer("there", ["a"])
    assert str(report_of(error, 0, "saving").rebuilt()) == str(error)


def test_the_text_of_an_error_is_there_whatever_its_class_does():
    class Speechless(Exception):
        def __str__(self):
            raise RuntimeError

    noted = ValueError("boom")
    if hasattr(noted, "add_note"):
        noted.add_note("part 'x'")
        assert text_of(noted) == "ValueError: boom (part 'x')"
    assert text_of(Speechless()) == "Speechless"
    assert text_of(ValueError()) == "ValueError"
    assert len(text_of(ValueError("x" * 10**6))) < 5000


def test_only_plain_errors_of_known_classes_may_be_pickled():
    assert survives_pickle(OSError(28, "full"))
    assert survives_pickle(SaveFailed("a", "b"))
    assert not survives_pickle(holding(ValueError("boom"), lock=threading.Lock()))
    assert not survives_pickle(ValueError(object()))
    assert not survives_pickle(Ours("a", "b"))
    assert not survives_pickle(Named.BrokenShard("boom"))
    assert is_plain({"a": [1, (2.0, None, b"x")]})
    assert not is_plain({"a": [1, {2}]})
