"""The drop-in on a real S3 server: stock's own calls and classes save and load by ours."""

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from servers import KEY, SECRET
from stock_fsspec import FsspecReader, FsspecWriter

from dcp_checkfreq import dropin

pytestmark = pytest.mark.slow


def state(value):
    return {"w": torch.full((300_000,), value), "step": int(value)}


def loaded(**how):
    target = state(0.0)
    dcp.load(target, **how)
    return [target["w"].unique().tolist(), target["step"]]


@pytest.fixture
def credentials(weed, monkeypatch):
    """What a script has that gives stock no options: the environment, and fsspec's own settings."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": weed.endpoint})


def test_stocks_classes_with_options(weed, root, stored):
    url = f"{root}/step_1"
    with dropin.install():
        for value in (1.0, 2.0):  # the second one replaces the first
            dcp.save(state(value), storage_writer=FsspecWriter(url, **weed.options))
        assert loaded(storage_reader=FsspecReader(url, **weed.options)) == [[2.0], 2]
        pending = dcp.async_save(state(3.0), storage_writer=FsspecWriter(url, **weed.options))
        pending.result()
    files = stored(url)
    assert ".metadata" in files
    assert "__0_0.distcp" not in files  # stock's name
    assert len([name for name in files if name.endswith(".distcp")]) == 1
    assert loaded(storage_reader=FsspecReader(url, **weed.options)) == [[3.0], 3]  # by stock


def test_checkpoint_id_alone(credentials, root, stored):
    url = f"{root}/step_1"
    with dropin.install():
        dcp.save(state(1.0), checkpoint_id=url)
        assert loaded(checkpoint_id=url) == [[1.0], 1]
        dcp.async_save(state(2.0), checkpoint_id=url).result()
        assert loaded(checkpoint_id=url) == [[2.0], 2]
    files = stored(url)
    assert "__0_0.distcp" not in files
    assert len([name for name in files if name.endswith(".distcp")]) == 1


@pytest.mark.filterwarnings("ignore:fsync not supported")  # of stock, since torch 2.15
def test_what_stock_has_written_is_loaded(weed, root):
    url = f"{root}/step_1"
    dcp.save(state(4.0), storage_writer=FsspecWriter(url, **weed.options))
    with dropin.install():
        assert loaded(storage_reader=FsspecReader(url, **weed.options)) == [[4.0], 4]
