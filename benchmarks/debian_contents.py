"""Debian's files: MACH by five aggregations, beside softmaxes over all 51,534 packages.

    python benchmarks/debian_contents.py --json debian.json

The setting and the methods are those of the recipe amazon-mach, which compares memories under MACH
alone. The tables' learning rate is tuned for each run by itself, on validation rows and with fewer
steps; then the model is trained and ranks all packages for each test row.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from sketchoptim.experiments.corpora import Part
from sketchoptim.experiments.recipes import Contestant, Setting, load_recipe
from sketchoptim.experiments.runs import run_settings
from sketchoptim.experiments.settings import TrainSettings
from sketchoptim.experiments.sweep import best_rate, tune
from sketchoptim.experiments.tasks import ClassOfText
from sketchoptim.experiments.text_classifier import Output, TextClassifierSettings
from sketchoptim.experiments.train import Training
from sketchoptim.nn import Aggregation, recall

AT = (1, 10, 100)
RECIPE = load_recipe("amazon-mach")
SETTING: Setting = RECIPE.sizes["small"]
assert isinstance(SETTING.model, TextClassifierSettings)
MODEL: TextClassifierSettings = SETTING.model


def main(arguments: list[str] | None = None) -> None:
    """Tunes, trains and measures every run, and prints its lines as soon as there are any."""
    options = parsed(arguments)
    torch.set_num_threads(options.threads)
    columns = "".join(f"{f'R@{k}':>9}" for k in AT)
    print(f"{'run':<16}{'ranked by':<10}{'lr':>8}{columns}{'table state':>14}{'weights':>13}")
    results = []
    for output, contestant in options.runs:
        results.append(measured(output, contestant, options))
        print(as_lines(results[-1]), flush=True)
        if options.json is not None:
            report = {"command": sys.argv, "torch": torch.__version__, "results": results}
            options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder; default: that of the recipe")
    parser.add_argument(
        "--runs", nargs="+", type=run_of, help="output:method, such as mach:lean; default: all",
        default=[
            (output, contestant)
            for output in get_args(Output)
            for contestant in RECIPE.contestants.values()
        ],
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=SETTING.train.steps)
    parser.add_argument("--batch", type=int, default=SETTING.train.batch)
    parser.add_argument("--dim", type=int, default=MODEL.dim, help="hidden units")
    parser.add_argument("--tuning-steps", type=int, default=100)
    parser.add_argument("--rate", type=float, help="of the tables, instead of tuning it")
    parser.add_argument("--test-rows", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="file for all numbers")
    return parser.parse_args(arguments)


def run_of(text: str) -> tuple[Output, Contestant]:
    """What "output:method" names."""
    output, _, method = text.partition(":")
    TextClassifierSettings(output=output)  # type: ignore[arg-type]
    return output, RECIPE.chosen([method])[0]  # type: ignore[return-value]


def measured(output: Output, contestant: Contestant, options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one run: its rates, and the test recalls at the best of them."""
    model = replace(MODEL, output=output, dim=options.dim)
    setting = replace(SETTING, model=model, train=replace(SETTING.train, batch=options.batch))
    task = setting.task(options.data)
    assert isinstance(task, ClassOfText)
    name = f"{output}:{contestant.method.name}"

    def settings(rate: float, steps: int) -> TrainSettings:
        method = contestant.method
        made = run_settings(setting, method, table_lr=rate, seed=options.seed, steps=steps)
        return replace(made, evaluate_every=0)

    def trial(rate: float) -> float:
        training = trained(task, settings(rate, options.tuning_steps))
        missed = 1 - recalls(task, training, "valid", limit=5_000)[1]
        print(f"{name}: lr {rate:g} misses {missed:.4f} at 10", file=sys.stderr, flush=True)
        return missed

    rates = {} if options.rate else tune(trial, rates=setting.sweep.table_lr)
    rate = options.rate or best_rate(rates)
    training = trained(task, settings(rate, options.steps))
    names = get_args(Aggregation) if output == "mach" else ("logits",)
    return {
        "run": name,
        "settings": training.settings.to_dict(),
        "missed_at_10_by_rate": rates,
        "weights": sum(weight.numel() for weight in training.model.parameters()),
        "table_state_bytes": training.run().table_state_bytes,
        "recalls": {
            aggregation: recalls(
                task, training, "test", limit=options.test_rows, aggregation=aggregation
            )
            for aggregation in names
        },
    }


def trained(task: ClassOfText, settings: TrainSettings) -> Training:
    """A training that has taken all its steps."""
    training = Training(task, settings)
    for _ in training.steps():
        pass
    return training


def recalls(
    task: ClassOfText,
    training: Training,
    part: Part,
    *,
    limit: int,
    aggregation: Aggregation = "mean",
) -> list[float]:
    """Recall@k for each k of `AT`: how many of the labels are among the k best classes of all."""
    found, labels = task.ranked(training.model, part, max(AT), limit=limit, aggregation=aggregation)
    return [recall(found[:, :k], labels) for k in AT]


def as_lines(result: dict[str, Any]) -> str:
    """One run, a line for each way to rank by it."""
    return "\n".join(
        f"{result['run']:<16}{aggregation:<10}{result['settings']['table_lr']:>8g}"
        + "".join(f"{value:>9.4f}" for value in values)
        + f"{result['table_state_bytes']:>14,}{result['weights']:>13,}"
        for aggregation, values in result["recalls"].items()
    )


if __name__ == "__main__":
    main()
