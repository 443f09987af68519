"""What the integrations do without their frameworks."""

import importlib
import importlib.util
import types

import pytest

from dcp_checkfreq import DataStateError, load_part
from dcp_checkfreq.integrations.needed import needed
from dcp_checkfreq.integrations.trainer_part import TrainerPart

FRAMEWORKS = ("transformers", "lightning", "torchtitan")


def without(framework):
    return pytest.mark.skipif(
        importlib.util.find_spec(framework) is not None, reason=f"{framework} is installed"
    )


@pytest.mark.parametrize("name", [pytest.param(name, marks=without(name)) for name in FRAMEWORKS])
def test_a_framework_that_is_not_installed_gives_one_line_with_what_to_install(name):
    with pytest.raises(ImportError, match=rf"pip install 'dcp-checkfreq\[{name}\]'") as caught:
        importlib.import_module(f"dcp_checkfreq.integrations.{name}")
    assert "\n" not in str(caught.value)


def test_an_import_that_fails_in_the_framework_comes_out_as_it_is():
    with pytest.raises(ModuleNotFoundError, match="numpyy"), needed("transformers"):
        import numpyy  # noqa: F401


def test_a_trainer_whose_step_is_other_samples_is_refused_with_both_numbers():
    part = TrainerPart()
    part.load_state_dict({"format": 1, "samples_per_step": 8, "state": '{"global_step": 3}'})
    part.check_samples(8)
    assert part.step == 3
    with pytest.raises(DataStateError, match=r"was 8 samples .* now is 12"):
        part.check_samples(12)


@pytest.mark.parametrize("state", [{}, {"format": 2, "state": "{}"}, {"format": 1, "state": 3}])
def test_what_is_no_state_of_a_trainer_is_refused(state):
    with pytest.raises(DataStateError, match="format 1"):
        TrainerPart().load_state_dict(types.MappingProxyType(state))


def test_the_saved_part_can_be_read_before_there_is_a_trainer(tmp_path):
    import dataclasses

    from dcp_checkfreq import Checkpointer

    @dataclasses.dataclass
    class State:
        global_step: int = 5
        log_history: list = dataclasses.field(default_factory=lambda: [{"loss": 0.1}])
        is_local_process_zero: bool = True

    part = TrainerPart(State, 8, lambda: {"sum": 0.25})
    with Checkpointer(tmp_path, {"trainer": part}) as ckpt:
        ckpt.after_step(5)
        ckpt.save(wait=True)
    read = TrainerPart()
    load_part(tmp_path / "step_00000005", "trainer", into=read)
    assert read.fields == {"global_step": 5, "log_history": [{"loss": 0.1}]}
    assert read.loss == {"sum": 0.25}
