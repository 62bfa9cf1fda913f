"""Debian's files: MACH by five aggregations, and softmaxes over all 51,534 packages.

    python -m experiments.studies.debian_contents --json debian.json

The setting and the methods are those of the recipe amazon-mach, which compares memories under MACH
alone. The tables' learning rate is tuned for each run, with the first seed, on validation rows and
with all steps, since fewer steps would favour a higher rate. Then the model of each seed ranks all
packages for each test row.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from sketchoptim.nn import Aggregation, recall

from ..corpora import Part
from ..errors import run_study
from ..recipes import Contestant, Setting, load_recipe
from ..runs import run_settings
from ..settings import TrainSettings
from ..sweep import tune
from ..tasks import ClassOfText
from ..text_classifier import Output, TextClassifier, TextClassifierSettings
from ..training import Training

AT = (1, 10, 100)
RECIPE = load_recipe("amazon-mach")
SETTING: Setting = RECIPE.sizes["small"]
assert isinstance(SETTING.model, TextClassifierSettings)
MODEL: TextClassifierSettings = SETTING.model


def main(arguments: list[str] | None = None) -> None:
    """Tunes, trains and measures every run, and prints its lines as soon as it is done."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    columns = "".join(f"{f'R@{k}':>16}" for k in AT)
    print(f"{'run':<16}{'ranked by':<10}{'lr':>8}{columns}{'table state':>14}{'weights':>13}")
    results = []
    for output, contestant in options.runs:
        results.append(measure(output, contestant, options))
        print(as_lines(results[-1]), flush=True)
        if options.json is not None:
            report = {"command": sys.argv, "torch": torch.__version__, "results": results}
            options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder; default: below SKETCHOPTIM_DATA")
    parser.add_argument(
        "--runs", nargs="+", type=parse_run, help="output:method, such as mach:lean; default: all",
        default=[
            (output, contestant)
            for output in get_args(Output)
            for contestant in RECIPE.contestants.values()
        ],
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=SETTING.train.steps)
    parser.add_argument("--batch", type=int, default=SETTING.train.batch)
    parser.add_argument("--dim", type=int, default=MODEL.dim, help="hidden units")
    parser.add_argument("--rate", type=float, help="of the tables, instead of tuning it")
    parser.add_argument("--test-rows", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="file for all numbers")
    return parser.parse_args(arguments)


def parse_run(text: str) -> tuple[Output, Contestant]:
    """The output layer and the contestant of "output:method"."""
    output, _, method = text.partition(":")
    TextClassifierSettings(output=output)  # type: ignore[arg-type]
    return output, RECIPE.select([method])[0]  # type: ignore[return-value]


def measure(output: Output, contestant: Contestant, options: argparse.Namespace) -> dict[str, Any]:
    """The rates of one run, and the test recalls of each seed at the best of them."""
    model = replace(MODEL, output=output, dim=options.dim)
    setting = replace(SETTING, model=model, train=replace(SETTING.train, batch=options.batch))
    task = setting.task(options.data)
    assert isinstance(task, ClassOfText)
    name = f"{output}:{contestant.method.name}"

    def at(rate: float, seed: int) -> Training:
        settings = run_settings(
            setting, contestant.method, table_lr=rate, seed=seed, steps=options.steps
        )
        return train(task, replace(settings, evaluate_every=0))

    first, *others = options.seeds
    best: tuple[float, Training] | None = None

    def trial(rate: float) -> float:
        nonlocal best
        training = at(rate, first)
        missed = 1 - recalls(task, training, "valid", limit=5_000)[1]
        print(f"{name}: lr {rate:g} misses {missed:.4f} at 10", file=sys.stderr, flush=True)
        if best is None or missed < best[0]:
            best = missed, training
        return missed

    rates = tune(trial, rates=setting.sweep.table_lr) if options.rate is None else {}
    training = at(options.rate, first) if best is None else best[1]
    rate = training.settings.table_lr
    results = [measure_test(task, training, options.test_rows)]
    results += [measure_test(task, at(rate, seed), options.test_rows) for seed in others]
    return {"run": name, "missed_at_10_by_rate": rates, "table_lr": rate, "seeds": results}


def train(task: ClassOfText, settings: TrainSettings) -> Training:
    """The training after all its steps."""
    training = Training(task, settings)
    for _ in training.steps():
        pass
    return training


def measure_test(task: ClassOfText, training: Training, rows: int) -> dict[str, Any]:
    """The size of a trained model, and its test recalls by each aggregation."""
    is_mach = task.settings.output == "mach"
    return {
        "settings": training.settings.to_dict(),
        "weights": sum(weight.numel() for weight in training.model.parameters()),
        "table_state_bytes": training.run().table_state_bytes,
        "recalls": {
            aggregation: recalls(task, training, "test", limit=rows, aggregation=aggregation)
            for aggregation in (get_args(Aggregation) if is_mach else ("logits",))
        },
    }


def recalls(
    task: ClassOfText,
    training: Training,
    part: Part,
    *,
    limit: int,
    aggregation: Aggregation = "mean",
) -> list[float]:
    """Recall@k for each k of `AT`: the share of labels among the k best of all classes."""
    model = training.model
    assert isinstance(model, TextClassifier)
    found, labels = task.rank(model, part, max(AT), limit=limit, aggregation=aggregation)
    return [recall(found[:, :k], labels) for k in AT]


def as_lines(result: dict[str, Any]) -> str:
    """One line for each aggregation of a run: mean and standard deviation over the seeds."""
    first = result["seeds"][0]
    lines = []
    for aggregation in first["recalls"]:
        by_k = zip(*(seed["recalls"][aggregation] for seed in result["seeds"]), strict=True)
        columns = "".join(f"{mean_and_deviation(values):>16}" for values in by_k)
        lines.append(
            f"{result['run']:<16}{aggregation:<10}{result['table_lr']:>8g}{columns}"
            f"{first['table_state_bytes']:>14,}{first['weights']:>13,}"
        )
    return "\n".join(lines)


def mean_and_deviation(values: tuple[float, ...]) -> str:
    """The mean, with the standard deviation where there is one."""
    mean = f"{statistics.fmean(values):.4f}"
    return f"{mean} ± {statistics.stdev(values):.4f}" if len(values) > 1 else mean


if __name__ == "__main__":
    run_study(main)
