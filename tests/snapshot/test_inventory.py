"""What tensors a state holds, under which names, and when two states have the same structure."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.planner import WriteItemType

from dcp_checkfreq import CheckFreqSavePlanner, UnsupportedState
from dcp_checkfreq.snapshot.inventory import Survey
from dcp_checkfreq.state.app_state import AppState


def training():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optim = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    model(torch.ones(3, 4)).sum().backward()
    optim.step()
    sched = torch.optim.lr_scheduler.StepLR(optim, 3)
    return {
        "model": model,
        "optim": optim,
        "sched": sched,
        "large": torch.ones(9000),
        "mixed": {"a": [torch.ones(9000), {"b": torch.ones(8000)}], 3: (torch.ones(2),)},
    }


def test_names_are_those_of_dcp():
    """`only` compares them with the keys of DCP's plan: one that differs would not be copied."""
    state = AppState(training(), 0).capture()
    planner = CheckFreqSavePlanner()
    planner.set_up_planner(state, None, True)
    items = planner.create_local_plan().items
    planned = {item.index.fqn for item in items if item.type is not WriteItemType.BYTE_IO}
    survey = Survey(state)
    assert {path for piece in survey.inventory.pieces for path in piece.paths} == planned
    assert len(planned) > 15


def test_every_piece_of_memory_is_found_once_with_all_its_names():
    one, two = torch.ones(3), torch.ones(3)
    survey = Survey({"a": one, "b": {"c": [one, two]}, "d": one.detach(), "e": one[:2]})
    assert [piece.paths for piece in survey.inventory.pieces] == [
        ("a", "b.c.0", "d"),
        ("b.c.1",),
        ("e",),
    ]


def test_state_bytes_count_the_same_memory_once():
    base = torch.ones(100)
    survey = Survey({"a": base, "tied": base, "same": base.detach(), "other": torch.ones(7)})
    assert survey.inventory.state_bytes == 4 * 107


def test_what_dcp_does_not_look_into_holds_no_tensor_of_ours():
    survey = Survey({"tuple": (torch.ones(3),), "object": object(), "set": {1}})
    assert survey.inventory.pieces == []
    assert [entry[0] for entry in survey.inventory.structure.leaves] == ["tuple", "object", "set"]


SAME = {
    "other values": lambda: {"w": torch.zeros(3), "n": 2, "l": [1, torch.ones(2)]},
    "other memory": lambda: {"w": torch.ones(6)[::2], "n": 1, "l": [1, torch.ones(2)]},
    "another kind of value": lambda: {"w": torch.ones(3), "n": "text", "l": [1, torch.ones(2)]},
}
OTHER = {
    "shape": lambda: {"w": torch.ones(4), "n": 1, "l": [1, torch.ones(2)]},
    "dtype": lambda: {"w": torch.ones(3).double(), "n": 1, "l": [1, torch.ones(2)]},
    "key": lambda: {"v": torch.ones(3), "n": 1, "l": [1, torch.ones(2)]},
    "more": lambda: {"w": torch.ones(3), "n": 1, "l": [1, torch.ones(2)], "m": 1},
    "less": lambda: {"w": torch.ones(3), "l": [1, torch.ones(2)]},
    "order": lambda: {"n": 1, "w": torch.ones(3), "l": [1, torch.ones(2)]},
    "tensor for value": lambda: {"w": torch.ones(3), "n": torch.ones(()), "l": [1, torch.ones(2)]},
    "longer list": lambda: {"w": torch.ones(3), "n": 1, "l": [1, torch.ones(2), 3]},
    "deeper": lambda: {"w": torch.ones(3), "n": 1, "l": [1, [torch.ones(2)]]},
    "mapping for list": lambda: {"w": torch.ones(3), "n": 1, "l": {"0": 1, "1": torch.ones(2)}},
    "dotted key": lambda: {"w": torch.ones(3), "n": 1, "l.0": 1, "l": {"1": torch.ones(2)}},
}


def structure(make):
    return Survey(make()).inventory.structure


@pytest.mark.parametrize("make", SAME.values(), ids=SAME.keys())
def test_a_kept_plan_still_fits_where_only_content_differs(make):
    base = structure(lambda: {"w": torch.ones(3), "n": 1, "l": [1, torch.ones(2)]})
    assert structure(make) == base


@pytest.mark.parametrize("make", OTHER.values(), ids=OTHER.keys())
def test_a_kept_plan_does_not_fit_another_structure(make):
    base = structure(lambda: {"w": torch.ones(3), "n": 1, "l": [1, torch.ones(2)]})
    assert structure(make) != base


def test_structures_that_are_equal_make_equal_plans():
    """The planner compares nothing again: a plan that fits by the survey is carried out."""

    def plan(state):
        planner = CheckFreqSavePlanner()
        planner.set_up_planner(state, None, True)
        made = planner.create_local_plan()
        for item in made.items:
            if item.tensor_data is not None:  # torch 2.15 plans strides, which are never written
                item.tensor_data.properties.strides = None
        return made.items, made.planner_data.mappings

    plain = [
        lambda: {"l": [1, "text"], "n": 1},
        lambda: {"l": {"0": 1, "1": "text"}, "n": 1},
        lambda: {"l": {0: 1, 1: "text"}, "n": 1},
        lambda: {"l": [], "n": 1},
        lambda: {"l": {}, "n": 1},
        lambda: {"l": (), "n": 1},
        lambda: {"l": [[], {}], "n": 1},
        lambda: {"l": OrderedDict({"0": 1, "1": "text"}), "n": 1},
    ]
    states = [make() for make in (*SAME.values(), *OTHER.values(), *plain)]
    equal = 0
    for one in states:
        for other in states:
            if Survey(one).inventory.structure == Survey(other).inventory.structure:
                assert plan(one) == plan(other)
                equal += 1
    assert equal > len(states)


def test_an_inventory_of_other_containers_is_not_recognised():
    known = Survey({"l": [1, "text"], "n": 1}).inventory
    survey = Survey({"l": {"0": 1, "1": "text"}, "n": 1}, [known])
    assert survey.inventory is not known
    assert Survey({"l": [2, None], "n": "x"}, [known]).inventory is known


@pytest.mark.parametrize("key", ["a", "deep"])
def test_a_tensor_that_cannot_be_written_is_refused_by_its_path(key):
    with pytest.raises(UnsupportedState, match=rf"'{key}\.0\.x'"):
        Survey({key: [{"x": torch.eye(3).to_sparse()}]})
