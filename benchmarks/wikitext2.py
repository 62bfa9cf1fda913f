"""WikiText-2: exact Adam against the compressed forms, each at its own best learning rate.

    python benchmarks/wikitext2.py --data ../shared/data/wikitext-2 --json wikitext2.json

One-layer LSTM between a sparse embedding and a sampled softmax, one pass over the training text.
The tables' learning rate is tuned per method on the validation text with the first seed; then
every seed is trained at that rate and measured on the whole validation and test text with the full
softmax. All methods share weights at the start, data order, steps and the dense layers' optimizer.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import torch

from sketchoptim.experiments.data import Corpus, read_wikitext
from sketchoptim.experiments.models import ModelSettings
from sketchoptim.experiments.sweep import best_rate, tune
from sketchoptim.experiments.train import Method, Run, TrainSettings, perplexity, train

MODEL = ModelSettings(dim=256, hidden=256, samples=1024)
GRIDS: dict[Method, tuple[float, ...]] = {
    "adagrad-exact": (0.1, 0.3, 1.0),
    "adagrad-lean": (0.1, 0.3, 1.0),
}
GRID = (0.01, 0.03, 0.1)
# about 2 % sampling error of a perplexity, enough to tell rates a factor of 3 apart
TUNING_WORDS = 40_000


def main(arguments: list[str] | None = None) -> None:
    """Tunes, trains, prints the table and writes the JSON."""
    options = parsed(arguments)
    torch.set_num_threads(options.threads)
    corpus = read_wikitext(options.data)
    results = [measured(corpus, method, options) for method in options.methods]
    print(as_text(results))
    if options.json is not None:
        report = {
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "threads": options.threads,
            "vocabulary": len(corpus.vocabulary),
            "words": options.words,
            "model": asdict(MODEL),
            "results": results,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    data = os.environ.get("SKETCHOPTIM_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(data) / "wikitext-2", help="folder")
    parser.add_argument("--methods", nargs="+", choices=get_args(Method), default=["exact", "lean"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1866, help="1866 is about one pass")
    parser.add_argument("--body-lr", type=float, default=3e-3, help="of the dense layers")
    parser.add_argument("--words", type=int, help="measure on the first so many; default: all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="file for all numbers")
    return parser.parse_args(arguments)


def measured(corpus: Corpus, method: Method, options: argparse.Namespace) -> dict[str, object]:
    """Everything about one method: its rates, and each seed at the best of them."""
    first, *others = options.seeds
    settings = TrainSettings(
        method=method, table_lr=1.0, body_lr=options.body_lr, steps=options.steps, seed=first
    )
    runs: dict[float, Run] = {}

    def trial(rate: float) -> float:
        runs[rate] = train(corpus, MODEL, replace(settings, table_lr=rate))
        found = perplexity(runs[rate].model, corpus.valid, words=TUNING_WORDS)
        log(f"{method}: lr {rate:g} -> {found:.1f}")
        return found

    rates = tune(trial, rates=GRIDS.get(method, GRID))
    best = replace(settings, table_lr=best_rate(rates))
    seeds = [summary(corpus, first, runs[best.table_lr], options.words)]
    runs.clear()
    for seed in others:
        run = train(corpus, MODEL, replace(best, seed=seed))
        seeds.append(summary(corpus, seed, run, options.words))
    return {"settings": asdict(best), "valid_by_rate": rates, "seeds": seeds}


def summary(corpus: Corpus, seed: int, run: Run, words: int | None) -> dict[str, float]:
    """What is reported of one trained model."""
    numbers = {
        "seed": seed,
        "valid": perplexity(run.model, corpus.valid, words=words),
        "test": perplexity(run.model, corpus.test, words=words),
        "table_state_bytes": run.table_state_bytes,
        "state_bytes": run.state_bytes,
        "step_seconds": run.step_seconds,
        "update_seconds": run.update_seconds,
    }
    log(json.dumps(numbers))
    return numbers


def as_text(results: list[dict[str, object]]) -> str:
    """The table: a line a method, mean ± sd over the seeds."""
    lines = [
        f"{'method':<14}{'lr':>8}{'valid ppl':>16}{'test ppl':>16}{'table state':>14}"
        f"{'all state':>13}{'step ms':>9}{'update ms':>11}"
    ]
    for result in results:
        settings, seeds = result["settings"], result["seeds"]
        assert isinstance(settings, dict)
        assert isinstance(seeds, list)
        step_ms, update_ms = (
            1e3 * statistics.median(seed[key] for seed in seeds)
            for key in ("step_seconds", "update_seconds")
        )
        lines.append(
            f"{settings['method']:<14}{settings['table_lr']:>8g}"
            f"{mean_sd([seed['valid'] for seed in seeds]):>16}"
            f"{mean_sd([seed['test'] for seed in seeds]):>16}"
            f"{seeds[0]['table_state_bytes']:>14,}{seeds[0]['state_bytes']:>13,}"
            f"{step_ms:>9.1f}{update_ms:>11.2f}"
        )
    return "\n".join(lines)


def mean_sd(values: list[float]) -> str:
    """'164.0 ± 1.2', or the value alone when there is one."""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def log(line: str) -> None:
    """Says at once how far the benchmark is."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
