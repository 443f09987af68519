"""`optimizer.step` waits for the snapshot before it changes anything, however it is called."""

import logging
import threading

import pytest
import torch
from torch import nn

from dcp_checkfreq import SnapshotFailed
from dcp_checkfreq.snapshot.optimizer_guard import Guard, address_of, guard_of


class Recorder:
    """A snapshot that takes down what the parameters were when it was waited for."""

    def __init__(self, parameters, error=None):
        self._parameters = list(parameters)
        self._error = error
        self.waits = []
        self.is_done = False

    def before_update(self):
        self.waits.append([p.detach().clone() for p in self._parameters])
        self.is_done = True
        if self._error is not None:
            raise self._error


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def equal(ours, theirs):
    return all(map(torch.equal, ours, theirs))


def backward(model):
    model(torch.ones(3, 4)).square().sum().backward()


def plain(optimizer, model):
    backward(model)
    optimizer.step()


def with_closure(optimizer, model):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def scaled(optimizer, model):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(3, 4)).square().sum()).backward()
    scaler.step(optimizer)


def scheduled(optimizer, model):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps `step`
    plain(optimizer, model)
    scheduler.step()


def adamw(**options):
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.1, **options)


WAYS = {
    "plain": (adamw(foreach=False), plain),
    "foreach": (adamw(foreach=True), plain),
    "fused": (adamw(fused=True), plain),
    "tensor lr": (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False), plain),
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), plain),
    "closure": (lambda p: torch.optim.LBFGS(p, lr=0.1), with_closure),
    "sgd closure": (lambda p: torch.optim.SGD(p, lr=0.1), with_closure),
    "scaler": (adamw(), scaled),
    "scaler fused": (adamw(fused=True), scaled),
    "scheduler": (adamw(), scheduled),
    "grouped": (lambda p: torch.optim.Adam([{"params": [one]} for one in p], lr=0.1), plain),
}


@pytest.mark.parametrize(("make", "step"), WAYS.values(), ids=WAYS.keys())
def test_a_step_waits_before_anything_has_changed(model, make, step):
    optimizer = make(model.parameters())
    guard = Guard([optimizer])
    before = values(model)
    snapshot = Recorder(model.parameters())
    guard.arm(snapshot)
    step(optimizer, model)
    assert len(snapshot.waits) == 1
    assert equal(snapshot.waits[0], before)
    assert not equal(values(model), before)
    step(optimizer, model)
    assert len(snapshot.waits) == 1, "one snapshot is waited for once"


def test_nothing_waits_before_the_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard, snapshot = Guard([optimizer]), Recorder(model.parameters())
    guard.arm(snapshot)
    for _ in range(3):
        backward(model)
    optimizer.zero_grad(set_to_none=True)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert snapshot.waits == []


def test_a_step_that_a_scaler_skips_does_not_wait(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard, snapshot = Guard([optimizer]), Recorder(model.parameters())
    guard.arm(snapshot)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.full((3, 4), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    assert snapshot.waits == []


def test_the_first_of_several_optimizers_waits(model):
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[1].parameters(), lr=0.1)
    guard = Guard([first, second])
    for chosen in (second, first):
        snapshot, before = Recorder(model.parameters()), values(model)
        guard.arm(snapshot)
        backward(model)
        chosen.step()
        assert equal(snapshot.waits[0], before)


def test_a_really_running_copy_is_waited_for(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard, done = Guard([optimizer]), threading.Event()
    order = []

    class Slow(Recorder):
        def before_update(self):
            threading.Timer(0.1, lambda: (order.append("copied"), done.set())).start()
            done.wait(10)
            super().before_update()

    guard.arm(Slow([]))
    optimizer.register_step_post_hook(lambda *_: order.append("stepped"))
    plain(optimizer, model)
    assert order == ["copied", "stepped"]


def test_a_failed_snapshot_is_logged_before_the_update_and_training_goes_on(model, caplog):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard, before = Guard([optimizer]), values(model)
    guard.arm(Recorder([], SnapshotFailed("no room")))
    with caplog.at_level(logging.ERROR):
        plain(optimizer, model)
        plain(optimizer, model)
    assert [r.getMessage() for r in caplog.records] == [
        "this step will not be saved: no snapshot was taken: no room"
    ]
    assert not equal(values(model), before)


def test_a_failed_snapshot_is_raised_before_the_update_if_asked(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard, before = Guard([optimizer], raise_errors=True), values(model)
    guard.arm(Recorder([], SnapshotFailed("no room")))
    backward(model)
    with pytest.raises(SnapshotFailed, match="no room"):
        optimizer.step()
    assert equal(values(model), before)
    optimizer.step()  # told once
    assert not equal(values(model), before)


def test_waiting_by_hand_waits_and_raises(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard, snapshot = Guard([optimizer]), Recorder([])
    guard.wait()
    guard.arm(snapshot)
    guard.wait()
    plain(optimizer, model)
    assert len(snapshot.waits) == 1
    guard.arm(Recorder([], SnapshotFailed("no room")))
    with pytest.raises(SnapshotFailed):
        guard.wait()


def test_a_closed_guard_is_gone(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard, snapshot = Guard([optimizer]), Recorder([])
    guard.arm(snapshot)
    guard.close()
    guard.close()
    plain(optimizer, model)
    assert snapshot.waits == []


def test_two_guards_on_one_optimizer_both_wait(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guards = [Guard([optimizer]), Guard([optimizer])]
    snapshots = [Recorder([]), Recorder([])]
    for guard, snapshot in zip(guards, snapshots, strict=True):
        guard.arm(snapshot)
    plain(optimizer, model)
    assert [len(snapshot.waits) for snapshot in snapshots] == [1, 1]


def test_writers_share_one_guard_per_optimizer_and_it_goes_with_the_optimizer(model):
    import gc
    import weakref

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = guard_of(optimizer)
    assert guard_of(optimizer) is guard
    gone = weakref.ref(optimizer)
    del optimizer, guard
    gc.collect()
    assert gone() is None


# --- what is guarded ---


def guarded_of(guard, named):
    addresses = guard.addresses()
    return {name for name, tensor in named.items() if address_of(tensor) in addresses}


def test_parameters_and_state_are_guarded_once_their_step_was_heard_of(model):
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.1)
    guard = Guard([optimizer])
    weight = model[0].weight
    named = dict(model.named_parameters())
    assert guarded_of(guard, named) == set(), "a step that runs no hook would not wait"
    plain(optimizer, model)
    named |= {key: value for key, value in optimizer.state[weight].items()}
    assert guarded_of(guard, named) == {"0.weight", "0.bias", "step", "exp_avg", "exp_avg_sq"}
    guard.arm(Recorder([]))
    assert guarded_of(guard, named) == set(), "until the next step"


def test_views_and_empty_tensors_are_not_guarded(model):
    empty = nn.Parameter(torch.empty(0))
    optimizer = torch.optim.SGD([*model.parameters(), empty], lr=0.1)
    guard = Guard([optimizer])
    plain(optimizer, model)
    weight = model[0].weight.detach()
    named = {"row": weight[:1], "empty": empty, "same": weight.view(-1), "copy": weight.clone()}
    assert guarded_of(guard, named) == {"same"}


def test_new_groups_and_replaced_storage_are_seen_at_once(model):
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    guard = Guard([optimizer])
    plain(optimizer, model)
    old = model[0].weight.detach()
    optimizer.add_param_group({"params": list(model[1].parameters())})
    model[0].weight.data = torch.zeros(4, 4)
    named = {"old": old, **dict(model.named_parameters())}
    assert guarded_of(guard, named) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_hooks_survive_torch_compile(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    guard, snapshot = Guard([optimizer]), Recorder(model.parameters())
    compiled = torch.compile(model, backend="eager")
    before = values(model)
    guard.arm(snapshot)
    backward(compiled)
    optimizer.step()
    assert equal(snapshot.waits[0], before)


# --- times ---


def test_updates_and_waits_are_told_in_order(model):
    class Times:
        def __init__(self):
            self.now, self.told = 0, []

        def mark(self):
            self.now += 1
            return self.now

        def add_wait(self, begun, ended):
            self.told.append(("waited", begun, ended))

        def add_update(self, begun, ended):
            self.told.append(("updated", begun, ended))

    times = Times()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard([optimizer], around_update=times)
    plain(optimizer, model)
    guard.arm(Recorder([]))
    plain(optimizer, model)
    assert times.told == [("updated", 1, 2), ("waited", 3, 4), ("updated", 5, 6)]
