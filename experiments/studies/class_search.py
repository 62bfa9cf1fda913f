"""The ten best of 49.5 million classes for 32 queries: time, memory, and the same as argsort.

    python -m experiments.studies.class_search

The limit is the time that one core takes to stream the scores, classes x members x queries x 4
bytes, from memory. It is measured by summing an array of three times the last-level cache, in turn
with the searches. A search can be faster, since the members' scores of buckets are read many times
and those of few members fit the caches. "peak MB" is the whole process during a search: the
interpreter and torch, the scores and their copy by bucket, and the array that is summed.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sketchoptim import _hashing
from sketchoptim.ops._top_classes import Combination, class_scores, top_classes

from ..errors import run_study
from ..machine import last_level_cache_bytes


def main(arguments: list[str] | None = None) -> None:
    """Measures every number of members and combination, then compares with argsort."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    print(
        f"{options.classes:,} classes, {options.buckets:,} buckets, {options.queries} queries, "
        f"top {options.k}, {options.threads} threads"
    )
    print(f"{'members':>7} {'combined':<9}{'seconds':>9}{'limit':>9}{'ratio':>7}{'peak MB':>9}")
    for members in options.members:
        for combination in options.combinations:
            print(measure(members, combination, options), flush=True)
    check_against_argsort(options)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--classes", type=int, default=49_500_000)
    parser.add_argument("--members", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--combinations", nargs="+", default=["sum", "least", "median"])
    parser.add_argument("--buckets", type=int, default=20_000)
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--compared", type=int, default=1_000_000, help="classes for argsort")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


def make_inputs(members: int, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Random probabilities of buckets, as peaked as a trained model's, and hash words."""
    generator = torch.Generator().manual_seed(members)
    shape = (members, options.queries, options.buckets)
    tables = (3 * torch.randn(shape, generator=generator)).softmax(2)
    return tables, _hashing.seeded(0, 0, members)


def check_against_argsort(options: argparse.Namespace) -> None:
    """Raises an error unless the ids are those of a plain sort of all scores."""
    tables, words = make_inputs(options.members[0], options)
    for combination in options.combinations:
        found = top_classes(tables, words, options.compared, options.k, combination)
        for query in range(options.queries):
            one = tables[:, query : query + 1]
            scores = class_scores(one, words, torch.arange(options.compared), combination)[0]
            order = np.argsort(-scores.numpy(), kind="stable")[: options.k]
            if not np.array_equal(found.ids[query].numpy(), order):
                raise AssertionError(f"{combination}: query {query} differs from argsort")
    print(f"equal to argsort over {options.compared:,} classes: {', '.join(options.combinations)}")


def measure(members: int, combination: Combination, options: argparse.Namespace) -> str:
    """One line of the table."""
    tables, words = make_inputs(members, options)
    stream = torch.zeros(3 * last_level_cache_bytes() // 4)
    score_bytes = options.classes * members * options.queries * 4
    searches, limits = [], []
    for _ in range(options.repetitions):
        reset_peak()
        start = time.perf_counter()
        stream.sum()
        middle = time.perf_counter()
        top_classes(tables, words, options.classes, options.k, combination)
        end = time.perf_counter()
        peak = peak_bytes() / 1e6
        stream.sum()
        streamed = middle - start + time.perf_counter() - end
        searches.append(end - middle)
        limits.append(score_bytes * streamed / (2 * 4 * stream.numel()))
    ratio = statistics.median(s / limit for s, limit in zip(searches, limits, strict=True))
    return (
        f"{members:>7} {combination:<9}{statistics.median(searches):>9.2f}"
        f"{statistics.median(limits):>9.2f}{ratio:>7.2f}{peak:>9.0f}"
    )


def reset_peak() -> None:
    """Starts the measurement of the peak memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The peak memory of the process since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    run_study(main)
