"""Debian's files: MACH under three memories, beside softmaxes over all 51,534 packages.

    python benchmarks/debian_contents.py --json debian.json

The tables' learning rate is tuned for each run by itself, on the end of the training file and with
fewer steps; then the model is trained and measured on the 20,000 test rows.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import torch

from sketchoptim.experiments.extreme import (
    Method,
    Output,
    Run,
    Settings,
    Task,
    read_task,
    recalls,
    train,
)
from sketchoptim.experiments.sweep import best_rate, tune
from sketchoptim.nn import Aggregation, FeatureHashing

AT = (1, 10, 100)
GRID = (0.01, 0.03, 0.1)
# a recall over so many rows is known to about half a percent
TUNING_ROWS = 5_000
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


def main(arguments: list[str] | None = None) -> None:
    """Tunes, trains and measures every run, and prints a line as soon as there is one."""
    options = parsed(arguments)
    torch.set_num_threads(options.threads)
    start = time.perf_counter()
    task = read_task(options.data, FeatureHashing(features=options.features), rows=options.rows)
    sizes = f"{len(task.train):,} + {len(task.valid):,} + {len(task.test):,} rows"
    log(f"{sizes}, {task.classes:,} classes, read in {time.perf_counter() - start:.0f} s")
    print(header())
    results = []
    for output, method in options.runs:
        results.append(measured(task, output, method, options))
        print(as_line(results[-1]), flush=True)
        print_aggregations(results[-1])
        if options.json is not None:
            report = {"command": sys.argv, "torch": torch.__version__, "results": results}
            options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    data = os.environ.get("SKETCHOPTIM_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(data) / "debian-contents", help="folder")
    parser.add_argument(
        "--runs", nargs="+", type=run_of, help="output:method, such as mach:lean; default: all",
        default=[(output, method) for output in get_args(Output) for method in get_args(Method)],
    )  # fmt: skip
    parser.add_argument("--rows", type=int, help="of the training file; default: all")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--tuning-steps", type=int, default=80)
    parser.add_argument("--rate", type=float, help="of the tables, instead of tuning it")
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--body-lr", type=float, default=Settings.body_lr)
    parser.add_argument("--features", type=int, default=Settings.features)
    parser.add_argument("--dim", type=int, default=Settings.dim)
    parser.add_argument("--members", type=int, default=Settings.members)
    parser.add_argument("--buckets", type=int, default=Settings.buckets)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="file for all numbers")
    return parser.parse_args(arguments)


def run_of(text: str) -> tuple[Output, Method]:
    """What "output:method" names; Settings looks at both."""
    output, _, method = text.partition(":")
    Settings(output=output, method=method, table_lr=1.0, steps=1)  # type: ignore[arg-type]
    return output, method  # type: ignore[return-value]


def measured(
    task: Task, output: Output, method: Method, options: argparse.Namespace
) -> dict[str, object]:
    """Everything about one run: its rates, and the test recalls at the best of them."""
    settings = Settings(
        output=output,
        method=method,
        table_lr=1.0,
        body_lr=options.body_lr,
        steps=options.tuning_steps,
        batch=options.batch,
        features=options.features,
        dim=options.dim,
        members=options.members,
        buckets=options.buckets,
        seed=options.seed,
    )
    held_out = task.valid.take(torch.arange(min(TUNING_ROWS, len(task.valid))))

    def trial(rate: float) -> float:
        missed = 1 - recalls(train(task, replace(settings, table_lr=rate)).model, held_out, [10])[0]
        log(f"{output}:{method}: lr {rate:g} misses {missed:.4f} at 10")
        return missed

    rates = {} if options.rate else tune(trial, rates=GRID)
    rate = options.rate or best_rate(rates)
    best = replace(settings, table_lr=rate, steps=options.steps)
    run = train(task, best)
    return {
        "settings": asdict(best),
        "missed_at_10_by_rate": rates,
        "loss": run.loss,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "train_seconds": run.train_seconds,
        "step_seconds": run.step_seconds,
        "update_seconds": run.update_seconds,
        "table_state_bytes": run.table_state_bytes,
        "state_bytes": run.state_bytes,
        "recalls": test_recalls(task, run, output),
    }


def test_recalls(task: Task, run: Run, output: Output) -> dict[str, list[float]]:
    """Recall at 1, 10 and 100 on the test rows, by aggregation where there is something to."""
    names: Sequence[Aggregation] = AGGREGATIONS if output == "mach" else AGGREGATIONS[:1]
    return {name: recalls(run.model, task.test, AT, aggregation=name) for name in names}


def header() -> str:
    """Names of the columns of `as_line`."""
    columns = "".join(f"{f'R@{k}':>9}" for k in AT)
    return (
        f"{'run':<16}{'lr':>8}{columns}{'table state':>14}{'all state':>13}{'weights':>13}"
        f"{'train s':>9}{'step ms':>9}{'update ms':>11}"
    )


def as_line(result: dict[str, object]) -> str:
    """One run, by the mean over members."""
    settings, found = result["settings"], result["recalls"]
    assert isinstance(settings, dict)
    assert isinstance(found, dict)
    name = f"{settings['output']}:{settings['method']}"
    shown = "".join(f"{value:>9.4f}" for value in found["mean"])
    return (
        f"{name:<16}{settings['table_lr']:>8g}{shown}{result['table_state_bytes']:>14,}"
        f"{result['state_bytes']:>13,}{result['parameters']:>13,}{result['train_seconds']:>9.0f}"
        f"{1e3 * float(str(result['step_seconds'])):>9.0f}"
        f"{1e3 * float(str(result['update_seconds'])):>11.1f}"
    )


def print_aggregations(result: dict[str, object]) -> None:
    """The other ways to rank by one ensemble, where it is one."""
    found = result["recalls"]
    assert isinstance(found, dict)
    for name, values in found.items() if len(found) > 1 else ():
        print(f"  {name:<22}" + "".join(f"{value:>9.4f}" for value in values), flush=True)


def log(line: str) -> None:
    """Says at once how far the benchmark is."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
