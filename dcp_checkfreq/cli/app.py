"""The commands of ``dcp-checkfreq``, and how an error ends it: one line, and its exit code."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from dcp_checkfreq.cli import looks, shows
from dcp_checkfreq.cli.summary import summary_of
from dcp_checkfreq.errors import BrokenShard, CheckFreqError
from dcp_checkfreq.runtime.clock import SystemClock
from dcp_checkfreq.storage.open import open_tier
from dcp_checkfreq.storage.tier import Tier

OF_USAGE, INTERRUPTED, OF_STORAGE = 2, 130, CheckFreqError.exit_code

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Look at checkpoints, check them, and bring them to other formats.",
)

Root = Annotated[str, typer.Argument(help="folder or URL of a run, with a folder for each step")]
Path_ = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="folder or URL of one checkpoint")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Digests = Annotated[bool, typer.Option(help="read all bytes and compare digests")]
Prefix = Annotated[str, typer.Option(help="of the keys to take, such as 'model.'; it is cut off")]
Trusts = Annotated[bool, typer.Option(help="let values run code: only for writers you trust")]


@app.command("list")
def list_(root: Root, json: Json = False) -> None:
    """List the steps of a root: whole or why not, size, age, ranks."""
    found = looks.steps_of(_place(root))
    if json:
        shows.as_json(found)
    else:
        shows.steps(found, SystemClock().wall_s())


@app.command()
def latest(root: Root, digests: Digests = False, json: Json = False) -> None:
    """Print the path of the newest whole checkpoint, for scripts."""
    path = looks.latest(_place(root), digests=digests)
    if json:
        shows.as_json({"path": path})
    else:
        typer.echo(path)


@app.command()
def plan(root: Root, digests: Digests = False, json: Json = False) -> None:
    """Say what a restart would choose, and why it would pass over others."""
    found = looks.choice_of(_place(root), digests=digests)
    if json:
        shows.as_json(found)
    else:
        shows.choice(found)


@app.command()
def verify(
    place: Annotated[str, typer.Argument(metavar="ROOT|CHECKPOINT", help="folder or URL")],
    digests: Digests = True,
    threads: Annotated[int, typer.Option(min=1, help="reads at once")] = 2,
    json: Json = False,
) -> None:
    """Check that checkpoints are as they were saved; damage names file, tensor and block."""
    columns = (TextColumn("{task.description}"), DownloadColumn(), TransferSpeedColumn())
    out = Console(stderr=True)
    with Progress(*columns, disable=not out.is_terminal, transient=True, console=out) as bars:
        task = bars.add_task("checking", total=None)

        def checked(name: str, size_bytes: int) -> None:
            bars.update(task, advance=size_bytes, description=name)

        found = looks.verdicts(_place(place), digests=digests, threads=threads, checked=checked)
    if json:
        shows.as_json(found)
    else:
        shows.verdicts(found)
    if any(one.problem is not None for one in found):
        raise typer.Exit(BrokenShard.exit_code)


@app.command()
def inspect(
    path: Path_,
    all_: Annotated[bool, typer.Option("--all", help="show all items, not 100")] = False,
    json: Json = False,
) -> None:
    """Show what a checkpoint holds: keys, shapes, dtypes, sizes, chunks, ranks."""
    found = summary_of(_place(path))
    if json:
        shows.as_json(found)
    else:
        shows.summary(found, len(found.items) if all_ else 100)


@app.command()
def export(
    path: Path_,
    to: Annotated[str, typer.Argument(help="folder for safetensors; a file for torch-save")],
    to_format: Annotated[
        str, typer.Option("--format", help="safetensors or torch-save")
    ] = "safetensors",
    prefix: Prefix = "",
    dtype: Annotated[
        Optional[str], typer.Option(help="cast floating-point tensors: bfloat16")  # noqa: UP045
    ] = None,
    max_file_mb: Annotated[int, typer.Option(min=1, help="of tensors in a file")] = 5000,
    allow_pickle: Trusts = False,
) -> None:
    """Write tensors of a checkpoint to safetensors as Hugging Face lays them out, or torch.save."""
    import torch

    from dcp_checkfreq.convert.to_safetensors import export_safetensors
    from dcp_checkfreq.convert.to_torch_save import export_torch_save

    if to_format == "torch-save":
        count = export_torch_save(path, to, prefix=prefix, allow_pickle=allow_pickle)
        typer.echo(f"{to}: {count} tensors and values")
        return
    if to_format != "safetensors":
        raise typer.BadParameter("must be safetensors or torch-save", param_hint="--format")
    kind = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not isinstance(kind, torch.dtype):
        raise typer.BadParameter(f"torch has no dtype {dtype!r}", param_hint="--dtype")
    made = export_safetensors(
        path, to, prefix=prefix, dtype=kind, max_file_bytes=max_file_mb * 10**6
    )
    size = shows.size_text(made.size_bytes)
    typer.echo(f"{to}: {len(made.names)} tensors, {len(made.files)} files, {size}")


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="safetensors file or folder, or torch.save file")],
    path: Path_,
    part: Annotated[str, typer.Option(help="name of the part; empty: the dict itself")] = "model",
    allow_pickle: Trusts = False,
) -> None:
    """Make a checkpoint of a model of others, which any number of ranks can load."""
    from dcp_checkfreq.convert.from_files import import_files

    import_files(source, path, part=part, allow_pickle=allow_pickle)
    typer.echo(path)


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def run(arguments: Annotated[list[str], typer.Argument(metavar="[-m] SCRIPT ARGS")]) -> None:
    """Run a training script: stock DCP saves and loads through dcp_checkfreq."""
    raise AssertionError(f"`main` runs {arguments[:1]} itself")


def _place(text: str) -> Tier:
    return open_tier(text)


def main(arguments: list[str] | None = None) -> None:
    """Run a command and end the process: 0, 2 for wrong usage, or the exit code of the error."""
    asked = sys.argv[1:] if arguments is None else arguments
    if asked[:1] == ["run"]:
        from dcp_checkfreq.dropin.command_line import run_asked

        run_asked(asked)
        return
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    try:
        app(asked, standalone_mode=True)
    except KeyboardInterrupt:
        _end("interrupted; nothing is left half done", INTERRUPTED)
    except CheckFreqError as error:
        _end(str(error), error.exit_code)
    except OSError as error:
        _end(str(error), OF_STORAGE)
    except ImportError as error:
        _end(str(error), OF_USAGE)


def _end(text: str, code: int) -> None:
    typer.echo(f"dcp-checkfreq: {text}", err=True)
    sys.exit(code)
