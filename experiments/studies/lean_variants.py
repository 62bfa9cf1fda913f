"""Variants of lean that the library does not have, on English Wikipedia of 2015.

    python -m experiments.studies.lean_variants lean row-column hot-second hot-first own-age
    python -m experiments.studies.lean_variants lean row-column hot-second --beta2 1 --rates 0.5

Trains the small model of the recipe wikitext103-adagrad and prints perplexities. All variants are
lean Adam without a first moment (lean Adagrad for `--beta2 1`) in plain torch operations:

- lean: as in the library, to check this file;
- row-column: a row's second moment times its column's share of squared gradients;
- hot-second: the rows of the most frequent words have a second moment for each element;
- hot-first: the rows of the most frequent words have a first moment;
- own-age: the bias correction of a row counts its own steps, in a second sketch, instead of all.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import sketchoptim as so

from ..errors import run_study
from ..recipes import load_recipe
from ..training import Training

VARIANTS = ("lean", "row-column", "hot-second", "hot-first", "own-age")
BETA1 = 0.9


class Variant(torch.optim.Optimizer):
    """Lean Adam or Adagrad with one of the changes above; sparse gradients only."""

    def __init__(self, tables: Iterable[Tensor], *, lr: float, kind: str, beta2: float, hot: int):
        super().__init__(tables, {"lr": lr})
        self.kind, self.beta2, self.hot = kind, beta2, hot
        self.weight = 1 - beta2 if beta2 < 1 else 1.0
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the rows that have gradients."""
        self.steps += 1
        for group in self.param_groups:
            for table in group["params"]:
                gradient = table.grad.coalesce()
                self.state[table] = self.state[table] or self._create(table)
                ids, values = gradient.indices()[0], gradient.values()
                table[ids] -= group["lr"] * self._direction(self.state[table], ids, values)

    def _create(self, table: Tensor) -> dict[str, Any]:
        rows, dim = table.shape
        seed = len(self.state)
        return {
            "second": so.CountMinSketch(3, rows // 24, 1, conservative=True, seed=seed),
            "ages": so.CountMinSketch(3, rows // 24, 1, conservative=True, seed=seed),
            "columns": torch.zeros(dim),
            "hot": torch.zeros(self.hot, dim),
        }

    def _direction(self, state: dict[str, Any], ids: Tensor, gradient: Tensor) -> Tensor:
        """The update before the learning rate."""
        squares = gradient.square()
        mean = squares.mean(1, keepdim=True)
        second = self._update(state["second"], ids, mean)
        corrected = 1 - self.beta2**self.steps if self.beta2 < 1 else 1.0
        if self.kind == "own-age":
            second = second / self._update(state["ages"], ids, torch.ones_like(mean))
            return gradient / (second.sqrt() + 1e-10)
        is_hot = ids < self.hot  # words are numbered by descending count
        hot = ids[is_hot]
        if self.kind == "row-column":
            shares = (squares / mean.clamp_min(1e-30)).mean(0)
            state["columns"].mul_(self.beta2).add_(shares)
            second = second * (state["columns"] / state["columns"].mean())
        elif self.kind == "hot-second":
            state["hot"].mul_(self.beta2)
            state["hot"][hot] += self.weight * squares[is_hot]
            second = second.expand_as(gradient).clone()
            second[is_hot] = state["hot"][hot]
        elif self.kind == "hot-first":
            state["hot"][hot] = state["hot"][hot].lerp(gradient[is_hot], 1 - BETA1)
            gradient = gradient.clone()
            gradient[is_hot] = state["hot"][hot]
        return gradient / ((second / corrected).sqrt() + 1e-10)

    def _update(self, sketch: so.CountMinSketch, ids: Tensor, values: Tensor) -> Tensor:
        """Each row's estimate after a step; all rows are read before any is written."""
        sketch.scale_(self.beta2)
        estimates = sketch.query(ids) + self.weight * values
        sketch.add_(ids, self.weight * values)
        return estimates


def train(kind: str, rate: float, options: argparse.Namespace) -> Training:
    """The training of one variant, after all its steps."""
    setting = load_recipe("wikitext103-adagrad").sizes["small"]
    steps = options.steps or setting.train.steps
    # with Adagrad for the tables, the dense layers have their own optimizer, which is kept
    settings = replace(
        setting.train, method="adagrad-lean", seed=options.seed, steps=steps, evaluate_every=0
    )
    training = Training(setting.task(options.data), settings)
    _, body = training.optimizers
    tables = training.model.named_tables().values()
    variant = Variant(tables, lr=rate, kind=kind, beta2=options.beta2, hot=options.hot)
    training.optimizers = [variant, body]
    training.schedulers[0] = LambdaLR(variant, lambda step: 1 - step / steps)
    for _ in training.steps():
        pass
    return training


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for each variant and rate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("variants", nargs="+", choices=VARIANTS)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05])
    parser.add_argument("--beta2", type=float, default=0.99, help="1 makes Adagrad of it")
    parser.add_argument("--hot", type=int, default=256, help="how many rows are hot")
    parser.add_argument("--steps", type=int, default=0, help="default: the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--words", type=int, default=5000, help="that perplexity is measured on")
    parser.add_argument("--data", type=Path, help="default: below SKETCHOPTIM_DATA")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    for kind in options.variants:
        for rate in options.rates:
            training = train(kind, rate, options)
            valid, test = (
                training.task.measure(training.model, part, limit=options.words)
                for part in ("valid", "test")
            )
            print(f"{kind:12} lr {rate:<6g} valid {valid:7.1f} test {test:7.1f}", flush=True)


if __name__ == "__main__":
    run_study(main)
