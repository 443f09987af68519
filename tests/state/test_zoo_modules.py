"""Modules of every kind come back exactly, or are refused when they are registered."""

import pytest
from zoo import check
from zoo_modules import MODULES


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", MODULES)
def test_a_module_comes_back_exactly_or_is_refused(tmp_path, name):
    check(MODULES[name], tmp_path)
