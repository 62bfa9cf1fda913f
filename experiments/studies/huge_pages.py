"""What huge pages are worth: steps whose sketches lie in them, and in pages of 4 KiB, in turn.

    python benchmarks/huge_pages.py

Ids are drawn from the One Billion Word counts, which $SKETCHOPTIM_DATA or ../shared/data holds.
Caches are flushed before every step.
"""

import argparse
import sys
from unittest import mock

import torch
from torch import nn

from sketchoptim import _pages

from ..bench.cases import Case, default_counts
from ..bench.gradients import WordFrequencies
from ..bench.measure import CacheFlusher, Entrant, interleaved
from ..bench.methods import BY_NAME


def main(arguments: list[str] | None = None) -> None:
    """Times every method on both kinds of pages."""
    options = parsed(arguments)
    if _pages.setting() not in ("always", "madvise"):
        raise SystemExit(f"huge pages are {_pages.setting()} here: there is nothing to compare")
    case = Case.parse(options.case)
    law = WordFrequencies.from_file(default_counts(), rows=case.rows)
    batches = [law.coalesced(case.rows, case.dim, case.touched, seed=seed) for seed in range(3)]
    parameter = nn.Parameter(torch.empty(case.rows, case.dim).uniform_(-0.1, 0.1))
    entrants = {}
    for kind, least_bytes in (("small", sys.maxsize), ("huge", 0)):
        for name in options.methods:
            method = BY_NAME[name].build(parameter, BY_NAME[name].memory)
            method.prepare(batches[0])
            with mock.patch.object(_pages, "_LEAST_BYTES", least_bytes):
                method.step()  # makes the sketches
            entrants[name, kind] = Entrant(method, batches, options.threads)
    times = interleaved(entrants, seconds=options.seconds, least=5, flusher=CacheFlusher())
    print(f"{case}, {options.threads} thread{'s' if options.threads > 1 else ''}")
    print(f"{'method':<16}{'small pages':>13}{'huge pages':>12}{'ratio':>7}")
    for name in options.methods:
        small, huge = (1e3 * times[name, kind].median for kind in ("small", "huge"))
        print(f"{name:<16}{small:>10.3g} ms{huge:>9.3g} ms{huge / small:>7.2f}")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    methods = ["paper-v-only", "paper-mv", "paper-mv-bf16", "linear-mv"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", default="793471x256x4096", help="rows x dim x touched rows")
    parser.add_argument("--methods", nargs="+", default=methods)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each time in the table")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
