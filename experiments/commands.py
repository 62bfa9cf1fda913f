"""The commands `demo`, `train`, `reproduce` and `bench`."""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from sketchoptim._formatting import readable_bytes

from .errors import StoppedError, user_message
from .recipes import Recipe, Size, load_recipe, recipe_names

_STOPPED = 130  # the status that shells give to a process that Ctrl-C ended
_TABLE_WIDTH = 150  # where the output is no terminal and COLUMNS is not set

_RECIPE = typer.Argument(help=f"One of {', '.join(recipe_names())}; or a TOML file of your own.")
_SMALL = typer.Option("--small", help="The size for two cores, instead of the paper's.")
_DATA = typer.Option(help="The data's file, folder or archive; default: below SKETCHOPTIM_DATA.")
_STEPS = typer.Option(min=1, help="Updates, instead of the recipe's.")
_THREADS = typer.Option(min=1, help="CPU threads; more only pay on an idle machine.")


class Commands(TyperGroup):
    """The commands; errors that the user can fix end them with one line and status 2."""

    def invoke(self, ctx: Any) -> Any:
        """The result of the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(_STOPPED) from None
        except Exception as error:
            message = user_message(error)
            if message is None:
                raise
            typer.echo(f"error: {message}", err=True)
            raise typer.Exit(2) from error


def build_app() -> typer.Typer:
    """The command line."""
    app = typer.Typer(
        cls=Commands,
        help="Training runs, reproductions and benchmarks of sketchoptim.",
        no_args_is_help=True,
        add_completion=False,
    )
    app.command("demo")(demo_command)
    app.command("train")(train_command)
    app.command("reproduce")(reproduce_command)
    app.command("bench")(bench_command)
    return app


def demo_command(
    steps: Annotated[int | None, _STEPS] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and the negatives.")] = 0,
    threads: Annotated[int, _THREADS] = 1,
    sources: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Train on this folder's .py files instead."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a demo that was stopped.")
    ] = False,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder for the report.")] = Path(
        "build/demo"
    ),
) -> None:
    """Train a language model on Python's own sources with SparseAdam and with lean."""
    from .demo import run_demo

    with _says_how_to_continue(() if resume else ("--resume",)):
        run_demo(
            steps=steps,
            seed=seed,
            threads=threads,
            sources=sources,
            resume=resume,
            output=output,
            command=_shown_command(),
            console=Console(),
        )


def train_command(
    recipe: Annotated[str, _RECIPE],
    small: Annotated[bool, _SMALL] = False,
    method: Annotated[str, typer.Option(help="One of the recipe's methods.")] = "lean",
    table_lr: Annotated[float | None, typer.Option(help="Of the tables.")] = None,
    body_lr: Annotated[float | None, typer.Option(help="Of the dense layers.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, dropout and negatives.")] = 0,
    steps: Annotated[int | None, _STEPS] = None,
    checkpoint_seconds: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Seconds between checkpoints, more where writing takes over 2 % of the time; "
            "inf for none.",
        ),
    ] = 30.0,
    data: Annotated[Path | None, _DATA] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    threads: Annotated[int, _THREADS] = 1,
    output: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for log, checkpoint and result.")
    ] = Path("build/train"),
    part_of_reproduction: Annotated[
        bool, typer.Option("--part-of-reproduction", hidden=True)
    ] = False,
) -> None:
    """Train one model of a recipe; started again, it continues from its last checkpoint."""
    from .runs import run_in, run_settings

    console = Console()
    torch.set_num_threads(threads)
    loaded, size = _load(recipe, small)
    setting = loaded.sizes[size]
    settings = run_settings(
        setting,
        loaded.select([method])[0].method_in(size),
        table_lr=table_lr,
        body_lr=body_lr,
        seed=seed,
        steps=steps,
        device=device,
    )
    with _says_how_to_continue(is_part=part_of_reproduction):
        result = run_in(
            output,
            setting,
            settings,
            data=data,
            checkpoint_seconds=checkpoint_seconds,
            console=console,
        )
    if "diverged" in result:
        console.print(f"[red]diverged: {escape(result['diverged'])}[/red]")
        raise typer.Exit(1)
    if part_of_reproduction:
        return  # whose tables show the result
    quality = [
        f"{part} {loaded.metric} {result[part]:.2f}"
        for part in ("valid", "test")
        if result[part] is not None
    ]
    memory = f"state of the tables {readable_bytes(result['table_state_bytes'])}"
    console.print(f"{', '.join([*quality, memory])} ({output})", markup=False)


def reproduce_command(
    recipe: Annotated[str, _RECIPE],
    small: Annotated[bool, _SMALL] = False,
    methods: Annotated[
        str | None, typer.Option(help="Some of the recipe's methods, with commas between.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, with commas between, instead of the recipe's.")
    ] = None,
    steps: Annotated[int | None, _STEPS] = None,
    data: Annotated[Path | None, _DATA] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    threads: Annotated[int, _THREADS] = 1,
    output: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder; default: build/<recipe>-<size>.")
    ] = None,
) -> None:
    """Run an experiment of the paper and print its numbers and ours side by side."""
    from .locks import locked
    from .report import comparison_table, write_report
    from .reproduction import reproduce, train_launcher

    console = Console()
    loaded, size = _load(recipe, small)
    setting = loaded.sizes[size]
    names = [name.strip() for name in methods.split(",")] if methods else None
    loaded.select(names)
    numbers = _parse_seeds(seeds) if seeds else None
    folder = output or Path("build") / f"{loaded.name}-{size}"
    with _says_how_to_continue():
        with console.status("reading the data"):
            setting.task(data)  # encodes texts here, so that no run's memory includes that
        with locked(folder):
            launch = train_launcher(
                recipe,
                setting,
                size,
                steps=steps,
                data=data,
                device=device,
                threads=threads,
                output=folder,
                console=console,
            )
            reproduction = reproduce(
                loaded,
                size,
                methods=names,
                seeds=numbers,
                command=_shown_command(),
                launch=launch,
                output=folder,
                console=console,
            )
            console.print(comparison_table(reproduction, console))
            console.print(f"report: {write_report(reproduction, folder)}", markup=False)


def bench_command(
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller tables, fewer repetitions: a minute.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="A part: steps, scaling, training, tables, many, dense, bags or heads; repeatable."
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="Rows x dim x touched rows, or tokens of a head, like 793471x256x4096; repeatable."
        ),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="A method, like lean or fbgemm; repeatable.")
    ] = None,
    level: Annotated[
        str | None,
        typer.Option(help="SIMD: v4 (AVX-512), v3 (AVX2) or base; default: the machine's."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    clock: Annotated[
        str, typer.Option(help="wall, or cpu: processor time of one thread, for a busy machine.")
    ] = "wall",
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Time for a method in each comparison.")
    ] = None,
    least: Annotated[
        int | None, typer.Option(min=1, help="Repetitions of even the slowest method.")
    ] = None,
    counts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="LM1B's word counts, a .npy file."),
    ] = None,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder for the JSON file.")] = Path(
        "build/bench"
    ),
) -> None:
    """Time an optimizer's step: ours against torch's, FBGEMM's and a sketch in torch."""
    from .bench.level import run_at
    from .bench.session import bench_settings, run_bench

    if level is not None:
        run_at(level)
    settings = bench_settings(
        quick=quick,
        parts=only,
        cases=case,
        methods=method,
        threads=threads,
        clock=clock,
        seconds=seconds,
        least=least,
    )
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _TABLE_WIDTH
    run_bench(settings, counts=counts, output=output, console=console)


@contextmanager
def _says_how_to_continue(more: tuple[str, ...] = (), *, is_part: bool = False) -> Iterator[None]:
    """Ends a command that the user stopped with status 130 and the command that continues it.

    Args:
        more: Arguments that the command needs besides those it was started with.
        is_part: Leaves that command to the reproduction that this run is a part of.
    """
    try:
        yield
    except (StoppedError, KeyboardInterrupt) as error:
        typer.echo(str(error) or "stopped", err=True)
        if not is_part:
            typer.echo(f"continue with: {_exact_command(*more)}", err=True)
        raise typer.Exit(_STOPPED) from None


def _load(name: str, small: bool) -> tuple[Recipe, Size]:
    recipe = load_recipe(name)
    size: Size = "small" if small else "full"
    if size not in recipe.sizes:
        raise ValueError(f"recipe {name} has no {size} size; it has {', '.join(recipe.sizes)}")
    return recipe, size


def _parse_seeds(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"seeds must be whole numbers with commas, got {text!r}") from None


def _shown_command() -> str:
    """The command line that this program was started with, as a report shows it."""
    return shlex.join(["experiments", *sys.argv[1:]])


def _exact_command(*more: str) -> str:
    """The command line that this program was started with, to be run here again."""
    program = [sys.argv[0]]
    if Path(sys.argv[0]).name == "__main__.py":
        program = [sys.executable, "-m", "experiments"]
    return shlex.join([*program, *sys.argv[1:], *more])
