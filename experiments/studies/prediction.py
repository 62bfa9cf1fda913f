"""The predictions of `so.plan` against measurements in training: bytes, and the error of v.

    python -m experiments.studies.prediction --json prediction.json

A one-layer LSTM between a sparse embedding and a sampled softmax is trained on WikiText-2 under
plans of three budgets, by row and by element. For each table the same moment is also kept without
collisions. Over the last steps, on the rows that a step touched, after it:

    error  = |estimate - v| / |v|              in l2, frequent rows weigh most
    row    = median of (estimate - v) / v      rare rows weigh most
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sketchoptim as so
from sketchoptim._names import named_parameters
from sketchoptim._rows import of_gradient
from sketchoptim.moments import Moment
from sketchoptim.nn import LogUniformSampler
from sketchoptim.optim._binding import live_moments

from ..corpora import Corpus, read_python_sources, segments
from ..errors import run_study
from ..models import LanguageModel, ModelSettings
from ..recipes import load_recipe

BATCH, LENGTH, SAMPLES = 32, 35, 1024
WIKITEXT2 = load_recipe("wikitext2-adam").sizes["small"].data
BETA2 = 0.999
MEASURED_STEPS = 50
# counters for each row, or for each element, of a table
RATIOS = (1 / 64, 1 / 16, 1 / 4)
# the ratio of median errors below this means nothing
NEGLIGIBLE = 0.05


def main(arguments: list[str] | None = None) -> None:
    """Trains under each plan, prints the table and writes the JSON."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    corpus = read_python_sources() if options.python else WIKITEXT2.read(options.data)
    results = []
    for granularity in ("row", "element"):
        for ratio in RATIOS:
            found = measure(corpus, granularity, ratio, options)
            print("\n".join(map(as_line, found)), flush=True)
            results += found
    if options.json is not None:
        report = {"command": [Path(sys.argv[0]).name, *sys.argv[1:]], "results": results}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    # after a few steps the widest sketches have no error at all
    results = [result for result in results if result["error"][1]]
    errors, rows = ([result[name] for result in results] for name in ("error", "row"))
    rows = [pair for pair in rows if max(pair) > NEGLIGIBLE]
    print(
        f"bytes are equal everywhere; errors are within a factor of {worst(errors):.2f}, "
        f"medians above {NEGLIGIBLE:.0%} within {worst(rows):.2f}"
    )


def worst(pairs: list[tuple[float, float]]) -> float:
    """The largest factor between a prediction and its measurement."""
    return math.exp(max(abs(math.log(predicted / seen)) for predicted, seen in pairs))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="WikiText-2; default: below SKETCHOPTIM_DATA")
    parser.add_argument("--python", action="store_true", help="train on Python's own sources")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.03, help="of the tables")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for all numbers")
    return parser.parse_args(arguments)


def measure(
    corpus: Corpus, granularity: Any, ratio: float, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The numbers of each table of a model, after training it under a plan."""
    torch.manual_seed(options.seed)
    settings = ModelSettings(dim=options.dim, hidden=options.dim, samples=SAMPLES)
    model = LanguageModel(len(corpus.vocabulary), settings)
    plan = make_plan(model, corpus, granularity, ratio, options.steps)
    groups = [
        {**group, "lr": options.lr if "memory" in group else 3e-3}
        for group in plan.param_groups(model)
    ]
    optimizer = so.Adam(groups, betas=(0.9, BETA2))
    shadows = {
        name: Shadow(table, is_by_row=granularity == "row")
        for name, table in model.named_tables().items()
        if (storage := plan.memory[name].second) is not None and storage.collides
    }
    train(model, corpus, optimizer, shadows, options)
    report = {p.name: p for p in so.memory_report(optimizer).parameters}
    for expected in plan.parameters:
        assert expected.moment_bytes == report[expected.name].moment_bytes, expected.name
    return [
        {
            "table": p.name,
            "granularity": granularity,
            "width": shadows[p.name].width,
            "state_bytes": p.state_bytes,
            "error": (p.error.relative, statistics.mean(shadows[p.name].errors)),
            "row": (p.error.median, statistics.mean(shadows[p.name].medians)),
        }
        for p in plan.parameters
        if p.name in shadows and p.error is not None
    ]


def make_plan(
    model: LanguageModel, corpus: Corpus, granularity: Any, ratio: float, steps: int
) -> so.planning.Plan:
    """The plan, from the frequencies of words and of the sampler's negatives."""
    tables = model.named_tables()
    numbers = {n: t.shape[0] if granularity == "row" else t.numel() for n, t in tables.items()}
    dense = sum(2 * parameter.nbytes for parameter in model.named_body().values())
    words = torch.bincount(corpus.train, minlength=len(corpus.vocabulary)) / corpus.train.numel()
    negatives = LogUniformSampler(len(words)).probability(torch.arange(len(words)))
    labels = BATCH * LENGTH * words + SAMPLES * negatives
    return so.plan(
        model,
        dense + int(4 * ratio * sum(numbers.values())),
        counts={name: words if name.startswith("embedding") else labels for name in tables},
        ids_per_step={
            name: BATCH * LENGTH + (0 if name.startswith("embedding") else SAMPLES)
            for name in tables
        },
        granularity=granularity,
        finest="array",  # the largest budget exceeds the default width
        beta2=BETA2,
        steps=steps,
    )


class Shadow:
    """The second moment of one table without collisions, and the errors of its sketch."""

    def __init__(self, table: Tensor, *, is_by_row: bool) -> None:
        self.table, self.is_by_row = table, is_by_row
        dim = 1 if is_by_row else table[0].numel()
        self.moment = torch.zeros(table.shape[0], dim)
        self.width = 0
        self.errors: list[float] = []
        self.medians: list[float] = []

    def follow(self) -> None:
        """Updates the moment with the table's gradient."""
        assert self.table.grad is not None
        rows = of_gradient(self.table.grad)
        assert rows.ids is not None
        squares = rows.values.square()
        self.ids, values = rows.ids, squares.mean(1, keepdim=True) if self.is_by_row else squares
        self.moment.mul_(BETA2)
        self.moment[self.ids] += (1 - BETA2) * values

    def compare(self, moment: Moment | None) -> None:
        """Records the errors on the rows that were touched."""
        assert moment is not None
        assert moment.sketch is not None
        self.width = moment.sketch.width
        estimate, truth = moment.estimate(self.ids), self.moment[self.ids]
        self.errors.append(float((estimate - truth).norm() / truth.norm()))
        kept = truth > 0
        self.medians.append(float((estimate[kept] / truth[kept] - 1).median()))


def train(
    model: LanguageModel,
    corpus: Corpus,
    optimizer: so.Adam,
    shadows: dict[str, Shadow],
    options: argparse.Namespace,
) -> None:
    """Trains, and compares every table over the last steps."""
    negatives, state = torch.Generator().manual_seed(options.seed), None
    pairs = segments(corpus.train, batch=BATCH, length=LENGTH)
    for step, (words, labels) in zip(range(options.steps), pairs, strict=False):
        loss, state = model.loss(words, labels, state, generator=negatives)
        optimizer.zero_grad()
        loss.backward()
        so.clip_grad_norm_(model.named_body().values(), 1.0)
        for shadow in shadows.values():
            shadow.follow()
        optimizer.step()
        if step >= options.steps - MEASURED_STEPS:
            for name, parameter, group in named_parameters(optimizer):
                if name in shadows:
                    shadows[name].compare(live_moments(optimizer, parameter, group).second)


def as_line(result: dict[str, Any]) -> str:
    """The numbers of one table, predicted / measured = ratio."""
    pairs = [
        f"{name} {predicted:9.4f} / {seen:9.4f} = {predicted / seen if seen else math.nan:5.2f}"
        for name in ("error", "row")
        for predicted, seen in [result[name]]
    ]
    return (
        f"{result['granularity']:<8}{result['table']:<17}3 x {result['width']:<6,}"
        f"{result['state_bytes']:>11,} bytes   {'   '.join(pairs)}"
    )


if __name__ == "__main__":
    run_study(main)
