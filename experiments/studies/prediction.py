"""What `so.plan` foretells against what training measures: bytes, and the error of v.

    python benchmarks/prediction.py --data ../shared/data/wikitext-2 --json prediction.json

A one-layer LSTM between a sparse embedding and a sampled softmax is trained on WikiText-2 under
plans of three budgets, by row and by element. Beside each table's sketch the same moment is kept
without collisions. Over the last steps, on the rows that a step touched, after it:

    error  = |estimate - v| / |v|              in l2, frequent rows weigh most
    a row  = median of (estimate - v) / v      rare rows weigh most
"""

import argparse
import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sketchoptim as so
from sketchoptim._rows import of_gradient
from sketchoptim.moments import open_moment
from sketchoptim.moments._sketched import SketchedMoment
from sketchoptim.nn import LogUniformSampler

from ..corpora import Corpus, read_python_sources, read_wikitext, segments
from ..models import LanguageModel, ModelSettings

BATCH, LENGTH, SAMPLES = 32, 35, 1024
BETA2 = 0.999
LOOKED_AT = 50
# counters for a row, or for an element, of each table
RATIOS = (1 / 64, 1 / 16, 1 / 4)
# a median error below this is as good as none, and its ratio says nothing
NEGLIGIBLE = 0.05


def main(arguments: list[str] | None = None) -> None:
    """Trains under each plan, prints the table and writes the JSON."""
    options = parsed(arguments)
    torch.set_num_threads(1)
    corpus = read_python_sources() if options.python else read_wikitext(options.data)
    results = []
    for granularity in ("row", "element"):
        for ratio in RATIOS:
            found = measured(corpus, granularity, ratio, options)
            print("\n".join(map(as_line, found)), flush=True)
            results += found
    if options.json is not None:
        report = {"command": [Path(sys.argv[0]).name, *sys.argv[1:]], "results": results}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    # the first steps touch each row once, and the widest sketches have no error at all
    results = [result for result in results if result["error"][1]]
    errors, rows = ([result[name] for result in results] for name in ("error", "row"))
    rows = [pair for pair in rows if max(pair) > NEGLIGIBLE]
    print(
        f"bytes are equal everywhere; errors are within a factor of {worst(errors):.2f}, "
        f"medians above {NEGLIGIBLE:.0%} within {worst(rows):.2f}"
    )


def worst(pairs: list[tuple[float, float]]) -> float:
    """The largest factor between what was foretold and what was measured."""
    return math.exp(max(abs(math.log(foretold / seen)) for foretold, seen in pairs))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    data = os.environ.get("SKETCHOPTIM_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(data) / "wikitext-2", help="folder")
    parser.add_argument("--python", action="store_true", help="train on Python's own sources")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.03, help="of the tables")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for all numbers")
    return parser.parse_args(arguments)


def measured(
    corpus: Corpus, granularity: Any, ratio: float, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A dict for each table of a model that was trained under a plan."""
    torch.manual_seed(options.seed)
    settings = ModelSettings(dim=options.dim, hidden=options.dim, samples=SAMPLES)
    model = LanguageModel(len(corpus.vocabulary), settings)
    plan = planned(model, corpus, granularity, ratio, options.steps)
    groups = [
        {**group, "lr": options.lr if "memory" in group else 3e-3}
        for group in plan.param_groups(model)
    ]
    optimizer = so.Adam(groups, betas=(0.9, BETA2))
    shadows = {
        name: Shadow(table, storage)
        for name, table in model.named_tables().items()
        if isinstance(storage := plan.memory[name].second, so.Sketched)
    }
    trained(model, corpus, optimizer, shadows, options)
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


def planned(
    model: LanguageModel, corpus: Corpus, granularity: Any, ratio: float, steps: int
) -> so.Plan:
    """The plan, from how often words occur and how often the sampler draws them."""
    tables = model.named_tables()
    numbers = {n: t.shape[0] if granularity == "row" else t.numel() for n, t in tables.items()}
    dense = sum(2 * parameter.nbytes for parameter in model.named_body().values())
    words = torch.bincount(corpus.train, minlength=len(corpus.vocabulary)) / corpus.train.numel()
    drawn = LogUniformSampler(len(words)).probability(torch.arange(len(words)))
    labels = BATCH * LENGTH * words + SAMPLES * drawn
    return so.plan(
        model,
        dense + int(4 * ratio * sum(numbers.values())),
        counts={name: words if name.startswith("embedding") else labels for name in tables},
        ids_per_step={
            name: BATCH * LENGTH + (0 if name.startswith("embedding") else SAMPLES)
            for name in tables
        },
        granularity=granularity,
        finest="array",  # the largest budget is for more than the default
        beta2=BETA2,
        steps=steps,
    )


class Shadow:
    """The second moment of one table without collisions, and how far the sketch is from it."""

    def __init__(self, table: Tensor, storage: so.Sketched) -> None:
        self.storage, self.table = storage, table
        dim = table[0].numel() if self.storage.granularity == "element" else 1
        self.moment = torch.zeros(table.shape[0], dim)
        self.width = self.storage.width
        self.errors: list[float] = []
        self.medians: list[float] = []

    def follow(self) -> None:
        """Moves with the gradient that the table has."""
        assert self.table.grad is not None
        rows = of_gradient(self.table.grad)
        assert rows.ids is not None
        squares = rows.values.square()
        is_row = self.storage.granularity == "row"
        self.ids, values = rows.ids, squares.mean(1, keepdim=True) if is_row else squares
        self.moment.mul_(BETA2)
        self.moment[self.ids] += (1 - BETA2) * values

    def compare(self, state: dict[str, Tensor]) -> None:
        """Looks at the rows that were touched."""
        parts = {k.removeprefix("second_"): t for k, t in state.items() if k.startswith("second_")}
        moment = open_moment(self.storage, "second", parts)
        assert isinstance(moment, SketchedMoment)
        estimate, truth = moment.sketch.query(self.ids), self.moment[self.ids]
        self.errors.append(float((estimate - truth).norm() / truth.norm()))
        kept = truth > 0
        self.medians.append(float((estimate[kept] / truth[kept] - 1).median()))


def trained(
    model: LanguageModel,
    corpus: Corpus,
    optimizer: so.Adam,
    shadows: dict[str, Shadow],
    options: argparse.Namespace,
) -> None:
    """Trains, and looks at every table over the last steps."""
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
        if step >= options.steps - LOOKED_AT:
            for shadow in shadows.values():
                shadow.compare(optimizer.state[shadow.table])


def as_line(result: dict[str, Any]) -> str:
    """One table's numbers, foretold / measured = ratio."""
    pairs = [
        f"{name} {foretold:9.4f} / {seen:9.4f} = {foretold / seen if seen else math.nan:5.2f}"
        for name in ("error", "row")
        for foretold, seen in [result[name]]
    ]
    return (
        f"{result['granularity']:<8}{result['table']:<17}3 x {result['width']:<6,}"
        f"{result['state_bytes']:>11,} bytes   {'   '.join(pairs)}"
    )


if __name__ == "__main__":
    main()
