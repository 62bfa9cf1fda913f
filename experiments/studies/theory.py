"""Bounds and measurements in one picture: docs/figures/theory_bound.png.

    python -m experiments.studies.theory

Left: the word counts of LM1B in a count-min sketch, each added in ten parts; the excess of a word's
estimate over its count against the bound of Markov's inequality. Right: RMSprop on a problem whose
constants are all known; the least squared gradient so far against the theorem's bound.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import sketchoptim as so
from sketchoptim import theory

from ..bench.cases import find_counts
from ..corpora import load_array
from ..errors import run_study

DEPTH = 3

WIDTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
FORMS = {"plain": ("tab:red", "o"), "conservative": ("tab:blue", "s")}
# The problem: f(x) = sum over rows of p * sum over columns of sqrt(1 + x^2), p by Zipf's law.
ROWS, DIM, BATCH, START, WIDTH = 1000, 4, 2048, 2.0, 125
LR, EPS, BETA2 = 2.0, 1.0, 0.999


def main(arguments: list[str] | None = None) -> None:
    """Measures both and draws them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--counts", type=Path, help="of LM1B; default: below SKETCHOPTIM_DATA")
    parser.add_argument("--words", type=int, default=100_000, help="the most frequent ones")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--output", type=Path, default=Path("docs/figures/theory_bound.png"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    counts = load_array(find_counts(options.counts))[: options.words]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_sketches(left, torch.from_numpy(counts.copy()))
    draw_training(right, options.steps)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=150)
    print(f"wrote {options.output}")


def draw_sketches(axes: Axes, counts: Tensor) -> None:
    """Errors of both forms over the width, and their bound."""
    share = 1 - math.exp(-DEPTH)
    bounds = [theory.count_min_guarantee(depth=DEPTH, width=width).epsilon for width in WIDTHS]
    axes.plot(WIDTHS, bounds, "k--", label=f"bound for {share:.1%} of words: e / width")
    for form, (color, marker) in FORMS.items():
        errors = [sketch_errors(counts, width, form == "conservative") for width in WIDTHS]
        for quantile, style in ((share, "-"), (0.5, ":")):
            values = [float(error.quantile(quantile)) for error in errors]
            label = f"{form}, {quantile:.1%} of words below"
            axes.plot(WIDTHS, values, color=color, marker=marker, linestyle=style, label=label)
            print(label, " ".join(f"{value:.2e}" for value in values))
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="width (buckets in each of 3 hash rows)",
        ylabel="(estimate - count) / sum of counts",
        title=f"Count-min over the {len(counts):,} most frequent words of LM1B",
    )
    axes.set_xticks(WIDTHS, [f"{width:,}" for width in WIDTHS])
    axes.minorticks_off()
    axes.legend(fontsize=8)


def sketch_errors(counts: Tensor, width: int, conservative: bool) -> Tensor:
    """The excess of each estimate over its count, divided by the sum of all counts."""
    sketch = so.CountMinSketch(DEPTH, width, 1, conservative=conservative)
    ids, total = torch.arange(len(counts)), counts.sum().item()
    for _ in range(10):
        sketch.add_(ids, counts.unsqueeze(1) / (10 * total))
    return (sketch.query(ids).squeeze(1).double() - counts / total).clamp_min(1e-12)


def draw_training(axes: Axes, steps: int) -> None:
    """The least squared gradient so far, and its bound, for both forms."""
    share = 1.0 / torch.arange(1, ROWS + 1)
    share /= share.sum()
    at = np.unique(np.geomspace(1, steps, 60).astype(int))
    for form, (color, _) in FORMS.items():
        bounds = [bound_of_run(share, int(step), form) for step in at]
        assert all(bound.holds for bound in bounds), bounds[0]
        found = np.minimum.accumulate(squared_gradients(share, steps, form == "conservative"))
        totals = [bound.total for bound in bounds]
        assert all(found[at - 1] <= totals)
        axes.plot(at, totals, "--", color=color, label=f"{form}, bound")
        # the two runs nearly coincide: the theorem assumes an eps that is large against sqrt(v)
        width = {"plain": 5, "conservative": 1.5}[form]
        axes.plot(at, found[at - 1], color=color, linewidth=width, label=f"{form}, measured")
        print(f"{form}: bound {totals[-1]:.2e}, measured {found[-1]:.2e} after {steps} steps")
        print(bounds[-1])
    axes.axhline(found[0], color="grey", linewidth=0.8, label="at the start")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="steps",
        ylabel="least squared gradient norm so far",
        title=f"RMSprop, {ROWS:,} rows over {DEPTH} x {WIDTH} counters",
    )
    axes.legend(fontsize=8)


def squared_gradients(share: Tensor, steps: int, conservative: bool) -> npt.NDArray[np.float64]:
    """The squared gradients of f along a run."""
    generator = torch.Generator().manual_seed(0)
    table = torch.nn.Parameter(torch.full((ROWS, DIM), START))
    sketch = so.Sketched(width=WIDTH, conservative=conservative)
    memory = so.Memory(second=sketch)
    optimizer = so.RMSprop([table], lr=LR, eps=EPS, alpha=BETA2, memory=memory)
    found = np.empty(steps)
    for step in range(steps):
        slope = table.detach() / (1 + table.detach() ** 2).sqrt()
        found[step] = float((share.unsqueeze(1) * slope).square().sum())
        samples = torch.multinomial(share, BATCH, replacement=True, generator=generator)
        ids, counts = samples.unique(return_counts=True)
        values = slope[ids] * (counts / BATCH).unsqueeze(1)
        table.grad = torch.sparse_coo_tensor(
            ids.unsqueeze(0), values, table.shape, is_coalesced=True, check_invariants=False
        )
        optimizer.step()
    return found


def bound_of_run(share: Tensor, steps: int, form: str) -> theory.ConvergenceBound:
    """The theorem for this problem: a sampled row's gradient is at most 1 in each column."""
    return theory.convergence_bound(
        lr=LR,
        eps=EPS,
        beta2=BETA2,
        smoothness=float(share.max()),
        largest_gradient=1.0,
        gradient_norm=math.sqrt(DIM * float(share.square().sum())),
        variance=DIM / BATCH,
        gap=DIM * (math.sqrt(1 + START**2) - 1),
        steps=steps,
        rows=ROWS,
        touched=ROWS,
        depth=DEPTH,
        width=WIDTH,
        form="conservative" if form == "conservative" else "plain",
    )


if __name__ == "__main__":
    run_study(main)
