"""WikiText-2: how the mass of gradients and moments is spread, and the errors of compressing it.

    python -m experiments.studies.power_laws --output build/power_law

One run of exact Adam over a one-layer LSTM between a sparse embedding and a sampled softmax gives

    power_law.png   the share of rows and elements that holds half of the mass, over the steps
    top_rows.png    sorted magnitudes at two steps, and the heaviest rows at three
    shadow.png      l2 errors of the embedding's moments in a sketch and in rank-one factors of as
                    many numbers, on touched rows and on all rows

and power_law.json with every number in them. For the third, sketches and factors follow the exact
moments, so that all see the same gradients.
"""

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

from sketchoptim.diagnostics import Shadow
from sketchoptim.diagnostics._power_law import Spread, power_law
from sketchoptim.optim._binding import live_moments
from sketchoptim.optim._names import named_parameters

from ..errors import run_study
from ..models import ModelSettings
from ..recipes import load_recipe
from ..settings import TrainSettings
from ..tasks import NextWords
from ..training import Training

MODEL = ModelSettings(dim=256, hidden=256, samples=1024)
WIKITEXT2 = load_recipe("wikitext2-adam").sizes["small"].data
TABLE_LR = 0.03
QUANTITIES = {"g": "gradient", "m": "first moment", "v": "second moment"}
SHOWN = ("embedding.weight", "lstm.weight_hh_l0")
SHADOWED = "embedding.weight"
STYLES = {
    "first sketch": ("count-sketch of the paper", "tab:orange", "-"),
    "first top-singular": ("rank one of least l2 error", "tab:green", "--"),
    "second sketch": ("count-min of the paper", "tab:orange", "-"),
    "second rank-one": ("rank one of row and column sums", "tab:purple", ":"),
    "second top-singular": ("rank one of least l2 error", "tab:green", "--"),
}


class Recorder:
    """Records the moments of an exact optimizer after its steps."""

    def __init__(self, optimizer: Any, *, steps: int, every: int) -> None:
        self.optimizer, self.every = optimizer, every
        self.shown_at = [max(1, steps // 8), steps // 2, steps]
        self.midpoints: list[dict[str, Any]] = []
        self.curves: list[dict[str, Any]] = []
        self.tops: list[dict[str, Any]] = []

    @torch.no_grad()
    def record(self, step: int) -> None:
        """Records what is due after the step."""
        for name, parameter, group in named_parameters(self.optimizer):
            if step % self.every == 0:
                for quantity, tensor in self.quantities(parameter, group).items():
                    law = power_law(tensor)
                    midpoints = {"row": law.row_midpoint, "element": law.element_midpoint}
                    labels = {"step": step, "parameter": name, "quantity": quantity}
                    self.midpoints.append({**labels, **midpoints})
            if step in self.shown_at and name in SHOWN:
                self.record_tops(step, name, self.quantities(parameter, group))

    def record_tops(self, step: int, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Records the sorted magnitudes and the heaviest rows."""
        for quantity in ("m", "v"):
            labels = {"step": step, "parameter": name, "quantity": quantity}
            spread = Spread()
            spread.add_(tensors[quantity].abs())
            ranks, magnitudes = spread.curve()
            self.curves.append({**labels, "ranks": ranks, "magnitudes": magnitudes})
            law = power_law(tensors[quantity])
            self.tops.append({**labels, "rows": law.top_rows, "masses": law.top_masses})

    def quantities(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The gradient and the exact moments."""
        assert parameter.grad is not None
        moments = live_moments(self.optimizer, parameter, group)
        ids = torch.arange(parameter.shape[0])
        assert moments.first is not None
        assert moments.second is not None
        first, second = moments.first.estimate(ids), moments.second.estimate(ids)
        return {"g": parameter.grad, "m": first, "v": second}


def main(arguments: list[str] | None = None) -> None:
    """Trains once, writes the JSON and draws the figures."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    settings = TrainSettings(
        method="exact", table_lr=TABLE_LR, steps=options.steps, seed=options.seed
    )
    training = Training(NextWords(WIKITEXT2.read(options.data), MODEL), settings)
    (optimizer,) = training.optimizers
    recorder = Recorder(optimizer, steps=options.steps, every=options.every)
    shadow = Shadow(optimizer, [training.model.named_tables()[SHADOWED]], every=options.every)
    for loss in training.steps():
        recorder.record(training.step)
        if training.step % 100 == 0:
            print(f"step {training.step}: loss {loss:.3f}", file=sys.stderr, flush=True)
    errors = [
        {**asdict(it), "touched_relative": it.touched_relative, "all_relative": it.all_relative}
        for it in shadow.records
    ]
    report = {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "torch": torch.__version__,
        "losses": training.losses,
        "midpoints": recorder.midpoints,
        "curves": recorder.curves,
        "tops": recorder.tops,
        "errors": errors,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "power_law.json"
    path.write_text(json.dumps(report) + "\n", encoding="utf-8")
    draw(path)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="WikiText-2; default: below SKETCHOPTIM_DATA")
    parser.add_argument("--steps", type=int, default=800, help="1866 is about one pass")
    parser.add_argument("--every", type=int, default=20, help="steps between records")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=Path("build/power_law"), help="folder")
    return parser.parse_args(arguments)


# -- figures --------------------------------------------------------------------------------------


def draw(path: Path) -> None:
    """Draws the figures next to the JSON with their numbers."""
    report = json.loads(path.read_text(encoding="utf-8"))
    for name, plot in (
        ("power_law", plot_midpoints),
        ("top_rows", plot_tops),
        ("shadow", plot_errors),
    ):
        figure = plot(report)
        figure.savefig(path.with_name(f"{name}.png"), dpi=100)
        plt.close(figure)


def plot_midpoints(report: dict[str, Any]) -> Any:
    """The midpoints of g, m and v over the steps: mean and largest over the layers."""
    figure, grid = plt.subplots(
        2, 3, figsize=(11, 6), sharex=True, sharey="row", layout="constrained"
    )
    for axes_of_unit, unit in zip(grid, ("element", "row"), strict=True):
        for axes, (quantity, title) in zip(axes_of_unit, QUANTITIES.items(), strict=True):
            found: dict[int, list[float]] = {}
            for point in report["midpoints"]:
                # a vector has one element in each row, and would count twice
                if point["quantity"] == quantity and "bias" not in point["parameter"]:
                    found.setdefault(point["step"], []).append(point[unit])
            largest, mean = (
                [f(values) for values in found.values()] for f in (max, statistics.mean)
            )
            axes.plot(found.keys(), largest, color="tab:red", label="largest of the layers")
            axes.plot(found.keys(), mean, color="black", label="mean of the layers")
            axes.axhline(0.5, color="grey", ls=":", label="uniform")
            axes.set_title(f"{title}, by {unit}")
            axes.set_ylim(0, 0.55)
            axes.grid(alpha=0.3)
    for axes in grid[:, 0]:
        axes.set_ylabel("share that holds half the mass")
    for axes in grid[-1]:
        axes.set_xlabel("step")
    grid[0, 0].legend(loc="center right")
    figure.suptitle("WikiText-2, exact Adam: weight matrices of embedding, LSTM and softmax")
    return figure


def plot_tops(report: dict[str, Any]) -> Any:
    """Sorted magnitudes at two steps, and the heaviest rows at three, of two layers."""
    figure, grid = plt.subplots(2, 4, figsize=(15, 6.5), layout="constrained")
    steps = sorted({curve["step"] for curve in report["curves"]})
    for line, parameter in zip(grid, SHOWN, strict=True):
        for column, quantity in enumerate(("m", "v")):
            sorted_axes, top_axes = line[column], line[column + 2]
            for curve in select(report["curves"], parameter, quantity):
                if curve["step"] in (steps[0], steps[-1]):
                    label = f"step {curve['step']}"
                    sorted_axes.loglog(curve["ranks"], curve["magnitudes"], label=label)
            for top, marker in zip(select(report["tops"], parameter, quantity), "ox+", strict=True):
                label = f"step {top['step']}"
                places = [row + 1 for row in top["rows"]]  # a log axis has no zero
                top_axes.plot(places, top["masses"], marker, ms=4, alpha=0.7, label=label)
            title = f"{parameter}\n{QUANTITIES[quantity]}"
            sorted_axes.set(title=title, xlabel="rank of the element", ylabel="magnitude")
            low, high = sorted_axes.get_ylim()
            sorted_axes.set_ylim(max(low, high * 1e-10), high)
            top_axes.set(
                title=f"{title}, top 100 rows", xlabel="row id + 1", ylabel="sum of the row"
            )
            top_axes.set_yscale("log")
            if parameter == SHADOWED:  # its rows are words, frequent ones first
                top_axes.set_xscale("log")
            for axes in (sorted_axes, top_axes):
                axes.grid(alpha=0.3)
                axes.legend()
    figure.suptitle("WikiText-2, exact Adam: sorted magnitudes, and the identities of the heaviest")
    return figure


def select(items: list[dict[str, Any]], parameter: str, quantity: str) -> list[dict[str, Any]]:
    """The items of one layer and one quantity, in the order of their steps."""
    return [it for it in items if it["parameter"] == parameter and it["quantity"] == quantity]


def plot_errors(report: dict[str, Any]) -> Any:
    """l2 errors over the steps: absolute on all rows, relative on all and on touched rows."""
    kinds = {
        "all_error": "error, all rows (l2)",
        "all_relative": "relative error, all rows",
        "touched_relative": "relative error, touched rows",
    }
    figure, grid = plt.subplots(2, 3, figsize=(12.5, 6.5), sharex=True, layout="constrained")
    for line, (moment, title) in zip(
        grid, {"first": "first moment", "second": "second moment"}.items(), strict=True
    ):
        for axes, (kind, label) in zip(line, kinds.items(), strict=True):
            for method in {r["method"]: None for r in report["errors"] if r["moment"] == moment}:
                records = [
                    r for r in report["errors"] if (r["moment"], r["method"]) == (moment, method)
                ]
                name, colour, style = STYLES[f"{moment} {method}"]
                axes.semilogy(
                    [r["step"] for r in records], [r[kind] for r in records],
                    color=colour, ls=style, label=f"{name}, {records[0]['floats']:,} numbers",
                )  # fmt: skip
            axes.set(title=title, ylabel=label)
            axes.grid(alpha=0.3, which="both")
        line[0].legend(fontsize=7, loc="lower right")
    for axes in grid[-1]:
        axes.set_xlabel("step")
    figure.suptitle(f"WikiText-2, Adam's moments of the {SHADOWED}, 33,278 x 256")
    return figure


if __name__ == "__main__":
    run_study(main)
