"""The cyclic collector is off while plans are made, and as before afterwards."""

import gc

import pytest

from dcp_checkfreq.runtime.gc_paused import collector_held


@pytest.fixture(autouse=True)
def enabled():
    gc.enable()
    yield
    gc.enable()


def test_it_is_off_inside_and_on_outside():
    with collector_held():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with collector_held():
        pass
    assert not gc.isenabled()


def test_the_last_holder_switches_it_on():
    first, second = collector_held(), collector_held()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_an_error_switches_it_on():
    with pytest.raises(KeyError), collector_held():
        raise KeyError
    assert gc.isenabled()
