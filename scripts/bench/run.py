"""Measure saves and loads against stock DCP and against the limits of the machine.

python scripts/bench/run.py save --state gpt --place disk --ranks 1 --repeats 5 --out out.json

All arms of a run take turns in random order, once a round; compare figures of one run only.
"""

from __future__ import annotations

import itertools
from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from benches import (
    PLACES,
    Options,
    Report,
    async_bench,
    call_bench,
    convert_bench,
    load_bench,
    reshard_bench,
    save_bench,
)
from benches_data import LOADS, data_bench
from benches_s3 import s3_bench
from benches_staged import staged_bench
from jobs_call import PARAMETERS
from report import print_report, read_reports, save_reports
from states import SCALES, STATES

StateName = Enum("StateName", {name: name for name in STATES}, type=str)
Scale = Enum("Scale", {name: name for name in SCALES}, type=str)
Place = Enum("Place", {name: name for name in PLACES}, type=str)
CallName = Enum("CallName", {name: name for name in PARAMETERS}, type=str)
LoadName = Enum("LoadName", {name: name for name in LOADS}, type=str)

Out = Annotated[Path, typer.Option(help="where the JSON goes")]
StateOf = Annotated[StateName, typer.Option(help="gpt: 1.71 GiB in 784; many: 10,000 x 16 KiB")]
PlaceOf = Annotated[Place, typer.Option(help="disk: out/bench here; tmpfs: /dev/shm")]
Folder = Annotated[Optional[Path], typer.Option(help="another folder than the place's own")]  # noqa: UP045 - evaluated on 3.10
RankCount = Annotated[int, typer.Option(min=1, help="worker processes")]
Repeats = Annotated[int, typer.Option(min=1, help="measured rounds, after one warm-up round")]
ScaleOf = Annotated[Scale, typer.Option(help="small: seconds, for smoke tests")]
Arms = Annotated[str, typer.Option(help="comma-separated; default all")]
CallOf = Annotated[CallName, typer.Option(help="how many tensors, of some KiB at most")]
LoadOf = Annotated[LoadName, typer.Option(help="what is loaded, or a resume")]
Workers = Annotated[str, typer.Option(help="numbers of worker processes, comma-separated")]
Seed = Annotated[int, typer.Option(help="of the order of the arms")]
Cases = Annotated[str, typer.Option(help="saved:loaded ranks, comma-separated")]

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = Console()
if not console.is_terminal:
    console = Console(width=170)  # a log file wraps nothing


@app.command()
def save(
    out: Out, state: StateOf = StateName.gpt, place: PlaceOf = Place.disk, folder: Folder = None,
    ranks: RankCount = 1, repeats: Repeats = 5, scale: ScaleOf = Scale.full, arms: Arms = "",
    seed: Seed = 0,
) -> None:  # fmt: skip
    """Blocking saves: wall and CPU seconds, peak memory, bytes on storage."""
    _finish(save_bench(_options(state, place, folder, ranks, repeats, scale, arms, seed)), out)


@app.command("async")
def async_(
    out: Out, state: StateOf = StateName.gpt, place: PlaceOf = Place.disk, folder: Folder = None,
    ranks: RankCount = 1, repeats: Repeats = 5, scale: ScaleOf = Scale.full, arms: Arms = "",
    seed: Seed = 0,
) -> None:  # fmt: skip
    """Background saves: seconds blocked (first in a fresh process, steady), harm to training."""
    _finish(async_bench(_options(state, place, folder, ranks, repeats, scale, arms, seed)), out)


@app.command()
def call(
    out: Out, state: CallOf = CallName.tensors160, place: PlaceOf = Place.disk,
    folder: Folder = None, repeats: Repeats = 31, scale: ScaleOf = Scale.full, arms: Arms = "",
    seed: Seed = 0,
) -> None:  # fmt: skip
    """Starts of saves of a model and AdamW: seconds the loop is held up for, hardly any bytes."""
    _finish(call_bench(_options(state, place, folder, 1, repeats, scale, arms, seed)), out)


@app.command()
def convert(
    out: Out, state: StateOf = StateName.gpt, place: PlaceOf = Place.disk, folder: Folder = None,
    repeats: Repeats = 5, scale: ScaleOf = Scale.full, arms: Arms = "", seed: Seed = 0,
) -> None:  # fmt: skip
    """Exports to safetensors and `torch.save`, and one tensor out of a checkpoint."""
    _finish(convert_bench(_options(state, place, folder, 1, repeats, scale, arms, seed)), out)


@app.command()
def load(
    out: Out, state: StateOf = StateName.gpt, place: PlaceOf = Place.disk, folder: Folder = None,
    ranks: RankCount = 1, repeats: Repeats = 5, scale: ScaleOf = Scale.full, arms: Arms = "",
    seed: Seed = 0,
) -> None:  # fmt: skip
    """Loads on as many ranks as saved, from a cold page cache where that is permitted."""
    _finish(load_bench(_options(state, place, folder, ranks, repeats, scale, arms, seed)), out)


@app.command()
def reshard(
    out: Out, state: StateOf = StateName.gpt, place: PlaceOf = Place.disk, folder: Folder = None,
    cases: Cases = "4:4,4:2,2:4,4:1", repeats: Repeats = 5, scale: ScaleOf = Scale.full,
    arms: Arms = "ours,stock", seed: Seed = 0,
) -> None:  # fmt: skip
    """Loads on another number of ranks than saved: time, and bytes read for bytes needed."""
    options = _options(state, place, folder, 1, repeats, scale, arms, seed)
    _finish(reshard_bench(options, cases), out)


@app.command()
def data(
    out: Out, load: LoadOf = LoadName.decode, workers: Workers = "0,2", folder: Folder = None,
    repeats: Repeats = 5, scale: ScaleOf = Scale.full, arms: Arms = "", seed: Seed = 0,
) -> None:  # fmt: skip
    """Data loaders: samples per second, CPU per sample, time to resume, bytes of the state."""
    options = _options(load, Place.disk, folder, 1, repeats, scale, arms, seed)
    _finish(data_bench(options, workers), out)


@app.command()
def s3(
    out: Out, state: StateOf = StateName.gpt, folder: Folder = None, ranks: RankCount = 1,
    cases: Cases = "4:2", repeats: Repeats = 5, scale: ScaleOf = Scale.full, arms: Arms = "",
    seed: Seed = 0,
) -> None:  # fmt: skip
    """Save, load and reshard on an S3 server that is started here: SeaweedFS."""
    options = _options(state, Place.disk, folder, ranks, repeats, scale, arms, seed)
    _finish(s3_bench(options, cases), out)


@app.command()
def staged(
    out: Out, state: StateOf = StateName.gpt, folder: Folder = None, ranks: RankCount = 1,
    repeats: Repeats = 5, scale: ScaleOf = Scale.full, arms: Arms = "", seed: Seed = 0,
) -> None:  # fmt: skip
    """Saves to an S3 server that takes 20 MB/s: how long training is held up, when it is saved."""
    _finish(
        staged_bench(_options(state, Place.disk, folder, ranks, repeats, scale, arms, seed)), out
    )


@app.command()
def report(files: list[Path]) -> None:
    """Print the tables of runs that were measured before."""
    for one in itertools.chain.from_iterable(read_reports(file) for file in files):
        print_report(one, console)


def _options(
    state: Enum, place: Enum, folder: Path | None, ranks: int, repeats: int, scale: Enum,
    arms: str, seed: int,
) -> Options:  # fmt: skip
    return Options(
        state=state.value, scale=scale.value, place=place.value, folder=folder, ranks=ranks,
        repeats=repeats, arms=arms, seed=seed,
    )  # fmt: skip


def _finish(reports: list[Report], out: Path) -> None:
    save_reports(reports, out)
    for one in reports:
        print_report(one, console)


if __name__ == "__main__":
    app()
