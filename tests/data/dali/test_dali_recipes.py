"""The code on the DALI page runs, from top to bottom."""

import torch
from page_tools import parted

PAGE = "docs/data-dali.md"


def test_every_block_runs_after_those_before_it(paths, tmp_path):
    model = torch.nn.Linear(1, 1)
    trained = []
    names = {
        "paths": paths,
        "labels": list(range(len(paths))),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "root": tmp_path,
        "train_step": lambda image, label: trained.extend(label.tolist()),
    }
    _script, blocks = parted(PAGE)  # the script runs in tests/test_readme.py
    assert len(blocks) == 3
    for code in blocks:
        exec(compile(code, PAGE, "exec"), names)
    assert sorted(trained) == sorted(3 * list(range(len(paths))))
    for name in ("loader", "reader"):  # of the later blocks
        batch = next(iter(names[name]))
        assert tuple(batch["image"].shape) == (32, 128, 128, 3)
