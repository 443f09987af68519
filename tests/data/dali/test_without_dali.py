"""Where DALI is not installed the loaders say what to install, and nothing else needs it."""

import sys

import pytest

from dcp_checkfreq import data


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ResumableDALILoader", (None, ["image"], ["1.png"], None, 1)),
        ("ResumableDALIReader", (None, ["image"], "Reader")),
    ],
)
def test_without_dali_its_loaders_name_the_extra(name, arguments, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(ImportError, match=rf"{name} needs DALI: pip install 'dcp-checkfreq\[dali"):
        getattr(data, name)(*arguments)
