"""The commands `demo`, `train` and `reproduce`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from typer.core import TyperGroup

from .machine import readable_bytes
from .recipes import Recipe, Size, load_recipe, recipe_names

_RECIPE = typer.Argument(help=f"One of {', '.join(recipe_names())}; or a TOML file of your own.")
_SMALL = typer.Option("--small", help="The size for two cores, instead of the paper's.")
_DATA = typer.Option(help="The data's file, folder or archive; default: below SKETCHOPTIM_DATA.")
_STEPS = typer.Option(min=1, help="Updates, instead of the recipe's.")
_THREADS = typer.Option(min=1, help="CPU threads; more only pay on an idle machine.")


class Commands(TyperGroup):
    """The commands, of which none shows a traceback for what its user can mend."""

    def invoke(self, ctx: Any) -> Any:
        """What the command gives."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever read the output has enough: click ends silently
            raise
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error)) from error


def add_commands(app: typer.Typer) -> None:
    """Adds them to the command line."""
    app.command()(demo)
    app.command()(train)
    app.command()(reproduce)


def demo(
    steps: Annotated[int | None, _STEPS] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and the negatives.")] = 0,
    threads: Annotated[int, _THREADS] = 1,
    sources: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Train on this folder's .py files instead."
        ),
    ] = None,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder for the report.")] = Path(
        "build/demo"
    ),
) -> None:
    """Train a language model on Python's own sources with exact Adam and with lean."""
    from .demo import run_demo

    run_demo(
        steps=steps,
        seed=seed,
        threads=threads,
        sources=sources,
        output=output,
        command=_command(),
        console=Console(),
    )


def train(
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
) -> None:
    """Train one model of a recipe; started again, it goes on from its last checkpoint."""
    from .runs import run_in, run_settings

    console = Console()
    torch.set_num_threads(threads)
    loaded, size = _loaded(recipe, small)
    setting = loaded.sizes[size]
    settings = run_settings(
        setting,
        loaded.chosen([method])[0].method,
        table_lr=table_lr,
        body_lr=body_lr,
        seed=seed,
        steps=steps,
        device=device,
    )
    result = run_in(
        output,
        setting,
        settings,
        data=data,
        checkpoint_seconds=checkpoint_seconds,
        console=console,
    )
    if "diverged" in result:
        console.print(f"[red]diverged: {result['diverged']}[/red]")
        raise typer.Exit(1)
    quality = (
        f"{part} {loaded.metric} {result[part]:.2f}"
        for part in ("valid", "test")
        if result[part] is not None
    )
    memory = readable_bytes(result["table_state_bytes"])
    console.print(", ".join([*quality, f"state of the tables {memory}"]), f"({output})")


def reproduce(
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
    """Run an experiment of the paper and print its table and ours side by side."""
    from . import reproduce as reproductions
    from .report import comparison_table, write_report

    console = Console()
    loaded, size = _loaded(recipe, small)
    setting = loaded.sizes[size]
    names = [name.strip() for name in methods.split(",")] if methods else None
    loaded.chosen(names)
    numbers = _whole_numbers(seeds) if seeds else None
    with console.status("reading the data"):
        setting.task(data)  # encodes texts, so that no run's memory shows that
    folder = output or Path("build") / f"{loaded.name}-{size}"
    folder.mkdir(parents=True, exist_ok=True)
    made = reproductions.reproduce(
        loaded,
        size,
        methods=names,
        seeds=numbers,
        command=_command(),
        launch=reproductions.launched_train(
            recipe,
            setting,
            size,
            steps=steps,
            data=data,
            device=device,
            threads=threads,
            output=folder,
            console=console,
        ),
        output=folder,
        console=console,
    )
    console.print(comparison_table(made, console))
    console.print(f"report: {write_report(made, folder)}")


def _loaded(name: str, small: bool) -> tuple[Recipe, Size]:
    recipe = load_recipe(name)
    size: Size = "small" if small else "full"
    if size not in recipe.sizes:
        raise ValueError(f"recipe {name} has no {size} size; it has {', '.join(recipe.sizes)}")
    return recipe, size


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"seeds must be whole numbers with commas, got {text!r}") from None


def _command() -> str:
    """The command line that this program was started with."""
    return shlex.join(["sketchoptim", *sys.argv[1:]])
