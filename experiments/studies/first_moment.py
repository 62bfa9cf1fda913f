"""First moments that no storage has: of the hottest rows alone, and by a row's own weight.

    python -m experiments.studies.first_moment

In the setting of first_moment.toml, with lean's second moment. Each is the best case of what a
compressed form could reach: the hottest fifth of the rows is known in advance (words are numbered
by their counts), and nothing collides.

    hot       m of the hottest fifth as in exact Adam; other rows have no m
    weighted  m of every row, decayed at every step like a sketch, divided by the decayed weight of
              its gradients, so that m of a rare row is its last gradient and not a tenth of it
    both      "weighted" for the hottest fifth
"""

import argparse
import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import sketchoptim as so

from ..errors import run_study
from ..recipes import load_recipe
from ..runs import run_settings
from ..sweep import best_rate, tune
from ..training import DivergedError, Training

Form = Literal["none", "hot", "weighted", "both"]
RECIPE = load_recipe(str(Path(__file__).with_name("first_moment.toml")))
SETTING = RECIPE.sizes["small"]
HOT = 0.2
BETA2 = 0.999
EPS = 1e-8


class Trial(torch.optim.Optimizer):
    """Adam for tables with sparse gradients: lean's second moment, and one of the first moments."""

    def __init__(self, tables: Iterable[nn.Parameter], *, form: Form, lr: float, beta1: float):
        super().__init__(tables, {"lr": lr})
        self.form, self.beta1, self.steps_taken = form, beta1, 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Updates the rows that have gradients."""
        self.steps_taken += 1
        for number, table in enumerate(self.param_groups[0]["params"]):
            state = self.state[table]
            if not state:
                state |= self._create(table, number)
            gradient = table.grad.coalesce()
            ids, values = gradient.indices()[0], gradient.values()
            second = self._second(state["second"], ids, values)
            root = (second / (1 - BETA2**self.steps_taken)).sqrt() + EPS
            rate = self.param_groups[0]["lr"]
            table.index_add_(0, ids, self._first(state, ids, values) / root, alpha=-rate)

    def _create(self, table: nn.Parameter, number: int) -> dict[str, Any]:
        rows, dim = table.shape
        kept = rows if self.form == "weighted" else int(HOT * rows)
        return {
            "second": so.CountMinSketch(3, rows // 24, 1, conservative=True, seed=number),
            "first": torch.zeros(kept, dim),
            "weight": torch.zeros(kept, 1),
            "last": torch.zeros(kept, 1),
        }

    def _second(self, sketch: so.CountMinSketch, ids: Tensor, values: Tensor) -> Tensor:
        """Lean's second moment: a row's own target, without the other rows of the batch."""
        sketch.scale_(BETA2)
        before = sketch.query(ids)
        own = (1 - BETA2) * values.square().mean(1, keepdim=True)
        sketch.add_(ids, own)
        return before + own

    def _first(self, state: dict[str, Any], ids: Tensor, values: Tensor) -> Tensor:
        """The first moment of rows that have one, the gradient of the others."""
        if self.form == "none":
            return values
        has_one = ids < len(state["first"])
        rows, own = ids[has_one], (1 - self.beta1) * values[has_one]
        if self.form == "hot":
            state["first"][rows] = self.beta1 * state["first"][rows] + own
            found = state["first"][rows] / (1 - self.beta1**self.steps_taken)
        else:
            decay = self.beta1 ** (self.steps_taken - state["last"][rows])
            state["last"][rows] = float(self.steps_taken)
            state["first"][rows] = decay * state["first"][rows] + own
            state["weight"][rows] = decay * state["weight"][rows] + (1 - self.beta1)
            found = state["first"][rows] / state["weight"][rows]
        moments = values.clone()
        moments[has_one] = found
        return moments


def main(arguments: list[str] | None = None) -> None:
    """Prints perplexities of each form at its best learning rate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="WikiText-2; default: below SKETCHOPTIM_DATA")
    parser.add_argument("--forms", nargs="+", choices=get_args(Form), default=get_args(Form))
    parser.add_argument("--betas", nargs="+", type=float, default=[0.9, 0.5])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    task = SETTING.task(options.data)
    print(f"{'form':<10}{'beta1':>6}{'lr':>7}{'valid':>9}{'test':>9}")
    for form, beta1 in itertools.product(options.forms, options.betas):
        if form == "none" and beta1 != options.betas[0]:
            continue
        rate, valid, test = tune_form(task, form, beta1)
        print(f"{form:<10}{beta1:>6}{rate:>7g}{valid:>9.1f}{test:>9.1f}", flush=True)


def tune_form(task: Any, form: Form, beta1: float) -> tuple[float, float, float]:
    """The best learning rate of the tables on validation text, and the perplexities with it."""
    tests: dict[float, float] = {}

    def trial(rate: float) -> float:
        valid, tests[rate] = measure(task, form, rate=rate, beta1=beta1)
        return valid

    valid_by_rate = tune(trial, rates=SETTING.sweep.table_lr)
    best = best_rate(valid_by_rate)
    return best, valid_by_rate[best], tests[best]


def measure(task: Any, form: Form, *, rate: float, beta1: float) -> tuple[float, float]:
    """Perplexity on validation and test text after training with the first seed."""
    settings = run_settings(SETTING, RECIPE.contestants["lean"].method, table_lr=rate)
    training = Training(task, replace(settings, evaluate_every=0))
    tables, body = training.model.named_tables(), training.model.named_body()
    training.optimizers = [
        Trial(tables.values(), form=form, lr=rate, beta1=beta1),
        so.Adam(body.values(), lr=settings.body_lr, memory="exact"),
    ]
    training.schedulers = [
        LambdaLR(optimizer, lambda step: 1 - step / settings.steps)
        for optimizer in training.optimizers
    ]
    for _ in training.steps():
        pass
    valid, test = (
        task.measure(training.model, part, limit=SETTING.test_words) for part in ("valid", "test")
    )
    if valid > 1e30:
        raise DivergedError(f"{form} at {rate}")
    return valid, test


if __name__ == "__main__":
    run_study(main)
