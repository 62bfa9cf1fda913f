"""What huge pages gain: steps with sketches in huge pages and in pages of 4 KiB, in turn.

    python -m experiments.studies.huge_pages

Ids are words of the One Billion Word Benchmark by their counts. Caches are flushed before every
step.
"""

import argparse
import sys
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from sketchoptim import _pages

from ..bench.cases import Case, find_counts
from ..bench.gradients import WordFrequencies
from ..bench.measure import CacheFlusher, Entrant, measure_in_turn
from ..bench.methods import BY_NAME
from ..errors import run_study


def main(arguments: list[str] | None = None) -> None:
    """Times every method on both kinds of pages."""
    options = parse_arguments(arguments)
    if _pages.setting() not in ("always", "madvise"):
        raise SystemExit(f"huge pages are {_pages.setting()} here: there is nothing to compare")
    case = Case.parse(options.case)
    frequencies = WordFrequencies.from_file(find_counts(options.counts), rows=case.rows)
    batches = [
        frequencies.coalesced(case.rows, case.dim, case.touched, seed=seed) for seed in range(3)
    ]
    parameter = nn.Parameter(torch.empty(case.rows, case.dim).uniform_(-0.1, 0.1))
    entrants = {}
    for kind, least_bytes in (("small", sys.maxsize), ("huge", 0)):
        for name in options.methods:
            method = BY_NAME[name].build(parameter, BY_NAME[name].memory)
            method.prepare(batches[0])
            with mock.patch.object(_pages, "_LEAST_BYTES", least_bytes):
                method.step()  # creates the sketches
            entrants[name, kind] = Entrant(method, batches, options.threads)
    times = measure_in_turn(entrants, seconds=options.seconds, least=5, flusher=CacheFlusher())
    print(f"{case}, {options.threads} thread{'s' if options.threads > 1 else ''}")
    print(f"{'method':<16}{'small pages':>13}{'huge pages':>12}{'ratio':>7}")
    for name in options.methods:
        small, huge = (1e3 * times[name, kind].median for kind in ("small", "huge"))
        print(f"{name:<16}{small:>10.3g} ms{huge:>9.3g} ms{huge / small:>7.2f}")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    methods = ["paper-v-only", "paper-mv", "paper-mv-bf16", "linear-mv"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", default="793471x256x4096", help="rows x dim x touched rows")
    parser.add_argument("--counts", type=Path, help="of LM1B; default: below SKETCHOPTIM_DATA")
    parser.add_argument("--methods", nargs="+", default=methods)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each time in the table")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_study(main)
