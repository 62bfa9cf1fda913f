"""Runs the grid, and prints its tables and its verdict. README.md has the rule.

    python -m experiments.studies.defaults run --tasks node2vec --methods lean,row-wise
    python -m experiments.studies.defaults run --methods "1 columns" --rates best --seeds 0,1,2
    python -m experiments.studies.defaults table

A run that is in the file is not repeated, so that a command can be stopped and started again.
"""

import warnings
from pathlib import Path
from typing import Annotated

import torch
import typer

from .runs import FACTORS, MEASURED, TASKS, Grid
from .verdict import markdown

METHODS = (
    "lean", "1/2", "1", "row-wise", "1/8 columns", "1/2 columns", "1 columns", "row-wise columns",
    "1/8 at least 4096", "1/8 at least 4096 columns",
    "1/8 at least 16384", "1/8 at least 16384 columns",
    "1/8 columns and row-wise below 4096", "1/8 columns and row-wise below 16384",
)  # fmt: skip

app = typer.Typer(help=__doc__, no_args_is_help=True, rich_markup_mode=None)
File = Annotated[Path, typer.Option(help="Where runs are kept, one in a line.")]


@app.command()
def run(
    tasks: str = ",".join(TASKS),
    methods: str = ",".join(METHODS),
    rates: str = ",".join(FACTORS),
    seeds: str = "0",
    file: File = MEASURED,
) -> None:
    """Trains what is not kept yet, all tasks by the first method before the second."""
    torch.set_num_threads(1)
    grid = Grid(file)
    for name in rates.split(","):
        for method in methods.split(","):
            for task in tasks.split(","):
                for seed in map(int, seeds.split(",")):
                    grid.value(task, method, grid.of_adam(task)[name], seed)


@app.command()
def table(methods: str = ",".join(METHODS), file: File = MEASURED) -> None:
    """Prints the kept runs as tables in Markdown, with what passes by the rule."""
    print(markdown(Grid(file), methods.split(",")))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is stepped by the reference kernels")
        app()
