"""States as f96207b saved them. What is DALI's own in them is of its version: made anew here."""

import json

from dali_tools import loader_of, take
from test_dali_checkpoint import rng_loader
from test_native_reader import reader_of
from test_native_reader import take as take_native

OF_LOADER = (
    '{"format":1,"epoch":0,"samples":32,"length":103,"seed":3,"order":"shuffled-1",'
    '"last":"partial","dataset":"72eac3c92fb2cd0f4e5d953836dc301f","global_batch":8}'
)
OF_READER = '{"format":1,"epoch":0,"batches":4,"length":103,"dataset":"images"}'


def test_a_state_of_an_earlier_version_loads_and_is_what_is_saved_today(paths):
    whole = loader_of(paths, seed=3)
    take(whole, 4)
    assert whole.state_dict() == {"state": OF_LOADER}
    resumed = loader_of(paths, seed=3)
    resumed.load_state_dict({"state": OF_LOADER})
    assert take(resumed) == take(whole)


def test_so_is_one_with_dalis_own_checkpoint_in_it(paths):
    whole = rng_loader(paths)
    take(whole, 4)
    state = json.loads(whole.state_dict()["state"])
    own = state.pop("dali")
    assert state == json.loads(OF_LOADER)
    assert list(own) == ["version", "rank", "world_size", "batch_size", "checkpoint"]
    resumed = rng_loader(paths)
    resumed.load_state_dict({"state": json.dumps({**json.loads(OF_LOADER), "dali": own})})
    assert take(resumed) == take(whole)


def test_so_is_one_of_a_native_reader(paths):
    whole = reader_of(paths, dataset_id="images")
    take_native(whole, 4)
    state = json.loads(whole.state_dict()["state"])
    of_dali = {key: state.pop(key) for key in ("dali", "graph")}
    assert state == json.loads(OF_READER)
    resumed = reader_of(paths, dataset_id="images")
    resumed.load_state_dict({"state": json.dumps({**json.loads(OF_READER), **of_dali})})
    assert take_native(resumed) == take_native(whole)
