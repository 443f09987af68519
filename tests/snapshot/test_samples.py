"""Issue 10: changes behind torch's back while a copy runs are noticed, by samples of memory."""

import gc
import weakref

import pytest
import torch

from dcp_checkfreq import Checkpointer, SnapshotFailed
from dcp_checkfreq.snapshot.inventory import Survey
from dcp_checkfreq.snapshot.pool import BufferPool
from dcp_checkfreq.snapshot.samples import SAMPLE_BYTES, Samples
from dcp_checkfreq.snapshot.stager import Stager
from dcp_checkfreq.testing import MemoryTier


def by_data(tensor):
    tensor.data.clamp_(max=0.5)


def by_numpy(tensor):
    tensor.detach().numpy()[...] *= 2


def by_dlpack(tensor):
    torch.from_dlpack(tensor.detach().__dlpack__()).add_(1)


def by_a_buffer(tensor):
    memoryview(tensor.detach().numpy()).cast("B")[:] = bytes(tensor.nbytes)


def samples_of(tensors):
    return Samples(tensors, [tensor.data_ptr() for tensor in tensors])


WAYS = [by_data, by_numpy, by_dlpack, by_a_buffer]


@pytest.mark.parametrize("halfway", [False, True])
@pytest.mark.parametrize("change", WAYS)
def test_a_write_that_torch_does_not_count_is_noticed(held, change, halfway):
    stager = Stager(BufferPool(wait_s=5.0), overlap_from_bytes=0)
    state = {str(n): torch.full((3000,), 1.0 + n) for n in range(8)}
    held.hold(halfway=halfway)
    everything = {piece.address for piece in Survey(state).inventory.pieces}
    snapshot = stager.begin(stager.survey(state), guarded=everything)
    assert held.begun.wait(10)
    before = state["5"]._version
    change(state["5"])
    assert state["5"]._version == before, "torch has counted it: this shows nothing"
    held.release()
    for look in (snapshot.before_update, snapshot.wait):
        with pytest.raises(SnapshotFailed, match=r"'5' was changed.*snapshot='blocking'"):
            look()
    stager.release()


def test_a_checkpoint_that_would_mix_two_states_is_not_saved(held):
    model = torch.nn.Linear(600, 600)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = Checkpointer(MemoryTier(), {"m": model, "o": optim}, every=1, snapshot="cpu")
    with ckpt:
        for step in range(2):
            model(torch.ones(600)).sum().backward()
            optim.step()
            if step:
                held.hold()
            ckpt.after_step()
            if not step:
                ckpt.wait()
        assert held.begun.wait(10)
        model.weight.data.clamp_(-0.01, 0.01)  # as WGAN does, right after the step
        held.release()
        ckpt.wait()
        assert ckpt.last_saved_step == 1
        assert "'m.weight' was changed while it was being copied" in ckpt.history[-1].error


@pytest.mark.parametrize("number", [1, 3, 1000, 1999, 2001, 7000])
def test_samples_are_bounded_and_see_a_change_of_all(number):
    tensors = [torch.zeros(500) for _ in range(number)]
    samples = samples_of(tensors)
    assert 0 < len(samples._sizes) <= 2000
    assert samples.first_changed() is None
    for tensor in tensors:
        tensor.add_(1)
    assert samples.first_changed() is not None


@pytest.mark.parametrize("elements", [1, 2, 127, 128, 129, 383, 384, 385, 5000])
def test_first_and_last_elements_are_seen(elements):
    for changed in (0, -1):
        tensor = torch.zeros(elements)
        samples = samples_of([tensor])
        assert sum(samples._sizes) <= 3 * SAMPLE_BYTES
        tensor[changed] = 1
        assert samples.first_changed() == 0


def test_tensor_kinds_are_left_out():
    odd = [
        torch.zeros(0),
        torch.zeros(10, 10).t(),
        torch.zeros(3, device="meta"),
        torch.zeros(4, 4)[:, 1],
    ]
    assert samples_of(odd).first_changed() is None
    assert samples_of([]).first_changed() is None


def test_samples_do_not_keep_tensors_alive():
    tensor = torch.zeros(5)
    gone = weakref.ref(tensor)
    samples = samples_of([tensor])
    gc.collect()
    del tensor
    assert gone() is None
    assert samples is not None
