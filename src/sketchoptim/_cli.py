"""The command line: `sketchoptim plan | inspect | doctor | check`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from . import __version__
from .planning import Finest, OptimizerName
from .storage import Granularity

if TYPE_CHECKING:
    import typer


def main() -> None:
    """Runs the command line, or prints what to install for it."""
    try:
        app = build_app()
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit(
            f"the command line needs {error.name}, which is not installed; "
            "run: pip install 'sketchoptim[cli]'"
        )
    app()


def build_app() -> "typer.Typer":
    """The commands. Built on demand, because the library itself needs neither typer nor rich."""
    import typer
    from rich.console import Console
    from typer.core import TyperGroup

    from .diagnostics import doctor as make_checkup
    from .diagnostics import inspect_checkpoint
    from .gpu_check import check_gpu
    from .planning import plan as make_plan

    class Commands(TyperGroup):
        """The commands; errors that the user can fix end them with one line and status 2."""

        def invoke(self, ctx: Any) -> Any:
            try:
                return super().invoke(ctx)
            except BrokenPipeError:  # the reader of our output has left; click ends silently
                raise
            except (OSError, ValueError) as error:
                typer.echo(f"error: {error}", err=True)
                raise typer.Exit(2) from error

    app = typer.Typer(
        cls=Commands,
        help="Memory-compressed optimizers for PyTorch.",
        no_args_is_help=True,
        add_completion=False,
    )

    def show_version(is_asked: bool) -> None:
        if is_asked:
            typer.echo(f"sketchoptim {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        version: Annotated[
            bool,
            typer.Option(
                "--version", is_eager=True, callback=show_version, help="Print the version."
            ),
        ] = False,
    ) -> None:
        pass

    @app.command()
    def plan(
        shapes: Annotated[
            Path,
            typer.Argument(
                exists=True, dir_okay=False, help="TOML or JSON: lists of tables and dense."
            ),
        ],
        budget: Annotated[str, typer.Option(help="Bytes, 200MB, 1.5GiB, or 5% of exact state.")],
        optimizer: Annotated[
            OptimizerName, typer.Option(help="Whose moments are to be kept.")
        ] = "Adam",
        granularity: Annotated[
            Granularity, typer.Option(help="A number for each row, or for each element.")
        ] = "row",
        finest: Annotated[
            Finest, typer.Option(help="No table gets more: the default width, or an array.")
        ] = "default",
        zipf: Annotated[
            float, typer.Option(min=0.0, help="Exponent of row frequencies, if the file has none.")
        ] = 1.0,
        ids_per_step: Annotated[
            int, typer.Option(min=1, help="Ids that a step looks up, repeated ones included.")
        ] = 4096,
        beta2: Annotated[float | None, typer.Option(help="Decay of the second moment.")] = None,
        steps: Annotated[int, typer.Option(min=1, help="Of training.")] = 10_000,
        ranks: Annotated[
            int, typer.Option(min=1, help="Processes that divide the rows; bytes are of one.")
        ] = 1,
        json: Annotated[
            Path | None,
            typer.Option(dir_okay=False, help="File for the plan, to be read by Plan.from_json."),
        ] = None,
    ) -> None:
        """Print the storage of each table that fits a budget, with its bytes and its error."""
        chosen = make_plan(
            shapes,
            budget,
            optimizer=optimizer,
            granularity=granularity,
            finest=finest,
            zipf=zipf,
            ids_per_step=ids_per_step,
            beta2=beta2,
            steps=steps,
            ranks=ranks,
        )
        typer.echo(chosen)
        if json is not None:
            json.write_text(chosen.to_json(), encoding="utf-8")

    @app.command()
    def inspect(
        checkpoint: Annotated[
            Path, typer.Argument(exists=True, dir_okay=False, help="A file of torch.save.")
        ],
    ) -> None:
        """Print a checkpoint's contents: bytes, load, and the estimated error of sketches."""
        typer.echo(inspect_checkpoint(checkpoint))

    @app.command()
    def doctor() -> None:
        """Print which backend runs, and why."""
        for name, finding in make_checkup().findings.items():
            Console().print(f"[bold]{name}[/bold]: {finding}", highlight=False, soft_wrap=True)

    check = typer.Typer(help="Check the kernels on this machine.", no_args_is_help=True)
    app.add_typer(check, name="check")

    @check.callback()
    def check_options() -> None:
        pass

    @check.command()
    def gpu(
        quick: Annotated[
            bool, typer.Option("--quick", help="Fewer storages, dtypes and widths.")
        ] = False,
        json: Annotated[
            Path | None, typer.Option(dir_okay=False, help="File for all that is found.")
        ] = None,
        device: Annotated[
            str, typer.Option(help="cuda, cuda:1, or interpreter, which needs no GPU.")
        ] = "cuda",
    ) -> None:
        """Compare the kernels of a GPU with the reference, and time them: up to five minutes."""
        for found in check_gpu(device, is_quick=quick):
            if isinstance(found, str):
                typer.echo(found)
                continue
            if json is not None:
                json.write_text(found.to_json(), encoding="utf-8")
            raise typer.Exit(0 if found.is_passed else 1)

    return app
