"""The state of each preset for the tables of the WikiText-2 model: docs/figures/memory.png.

    python -m experiments.studies.memory_figure

The bytes are those that `so.memory_report` measures after a step: input table, output table and the
output's bias.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import sketchoptim as so
from sketchoptim._formatting import readable_bytes
from sketchoptim.nn import SampledSoftmax

from ..errors import run_study

WORDS, DIM = 33_278, 256
PRESETS = ("exact", "paper-v", "paper-mv", "row-wise", "lean")


def main(arguments: list[str] | None = None) -> None:
    """Measures and draws."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("docs/figures/memory.png"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tables = nn.Sequential(
        nn.Embedding(WORDS, DIM, sparse=True), SampledSoftmax(DIM, WORDS, samples=1, bias=True)
    )
    embedding, softmax = tables
    softmax(embedding(torch.tensor([0])), torch.tensor([0])).backward()
    sizes = {"the tables themselves": sum(it.nbytes for it in tables.parameters())}
    for preset in PRESETS:
        optimizer = so.Adam(tables.parameters(), memory=preset)
        optimizer.step()
        sizes[f'state of "{preset}"'] = so.memory_report(optimizer).state_bytes
    draw(sizes, options.output)
    for name, size in sizes.items():
        print(f"{name}: {size:,} bytes")


def draw(sizes: dict[str, int], path: Path) -> None:
    """Bars on a linear scale, so that lengths are proportional to bytes."""
    figure = Figure(figsize=(6.0, 3.2), layout="constrained")  # readable on a phone
    axes = figure.subplots()
    colors = ["tab:gray", *["tab:red"] * (len(sizes) - 2), "tab:blue"]
    bars = axes.barh([*sizes], [*sizes.values()], color=colors)
    axes.bar_label(bars, [readable_bytes(size) for size in sizes.values()], padding=4, fontsize=13)
    axes.set_title(f"Adam, two tables of {WORDS:,} x {DIM}", fontsize=13, loc="left")
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xticks([])
    axes.tick_params(left=False, labelsize=13)
    axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    run_study(main)
