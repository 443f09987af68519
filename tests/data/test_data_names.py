"""`dcp_checkfreq.data` costs nothing to import, and works where NumPy is not installed."""

import subprocess
import sys

import pytest

import dcp_checkfreq.data as data

OURS = [
    "DataStateError",
    "RNGState",
    "ResumableBatchSampler",
    "ResumableIterator",
    "ResumableLoader",
    "sample_rng",
    "seed_everything",
]


def run(code):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", OURS)
def test_every_name_is_there_and_says_what_it_is(name):
    assert name in data.__all__
    assert getattr(data, name).__name__ == name
    assert getattr(data, name).__doc__


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="attribute ResumeableLoader"):
        data.ResumeableLoader  # noqa: B018


@pytest.mark.slow
def test_importing_it_imports_nothing_heavy():
    code = (
        "import sys, dcp_checkfreq.data; dcp_checkfreq.data.__all__;"
        "print(sorted({'torch', 'numpy', 'pyarrow', 'nvidia', 'fsspec'} & set(sys.modules)))"
    )
    assert run(code) == "[]"


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None  # as if it were not installed
import random, torch
from dcp_checkfreq.data import ResumableIterator, ResumableLoader, RNGState, seed_everything

class Draws:
    def __len__(self): return 70_000
    def __getitem__(self, index): return index, random.random(), torch.rand(())

seed_everything(1)
loader = ResumableLoader(Draws(), 10, seed=3)
first = [torch.stack([i.double(), p, t.double()]) for _, (i, p, t) in zip(range(5), loader)]
rng = RNGState(rank=0)
state = rng.state_dict()
wanted = random.random(), torch.rand(()).item()
rng.load_state_dict(state)
assert wanted == (random.random(), torch.rand(()).item())
assert len(list(ResumableIterator([1, 2, 3]))) == 3
print(loader.samples, hash(tuple(torch.stack(first).flatten().tolist())))
"""


@pytest.mark.slow
def test_without_numpy_the_batches_are_the_same():
    with_it = WITHOUT_NUMPY.replace('sys.modules["numpy"] = None', "")
    assert run(WITHOUT_NUMPY) == run(with_it)
