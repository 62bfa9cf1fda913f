"""Short texts hashed in a second, on one core.

    python benchmarks/feature_hashing.py

Texts are Debian's paths, 61 bytes each in the mean, or with --bytes random letters of that length.
Time is the processor's, so that other processes count little; numbers are medians.
"""

import argparse
import lzma
import os
import random
import statistics
import string
import time
from itertools import islice
from pathlib import Path

import torch

from sketchoptim.nn import FeatureHashing


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for each kind of features."""
    options = parsed(arguments)
    torch.set_num_threads(1)
    texts = random_texts(options) if options.bytes else paths(options)
    mean = statistics.mean(len(text.encode()) for text in texts)
    print(f"{len(texts):,} texts of {mean:.1f} bytes in the mean")
    for unit in ("trigrams", "words"):
        for signed in (False, True):
            hashing = FeatureHashing(unit=unit, signed=signed)
            seconds = [measured(hashing, texts) for _ in range(options.repetitions)]
            rate = len(texts) / statistics.median(seconds)
            print(
                f"{unit:<10}{'signed' if signed else 'unsigned':<10}{rate:>12,.0f} texts a second"
            )


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    data = os.environ.get("SKETCHOPTIM_DATA", "../shared/data")
    file = Path(data) / "debian-contents" / "train.tsv.xz"
    parser.add_argument("--data", type=Path, default=file, help="lines of path<TAB>package, as xz")
    parser.add_argument("--bytes", type=int, help="length of random texts, instead of paths")
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--repetitions", type=int, default=7)
    return parser.parse_args(arguments)


def paths(options: argparse.Namespace) -> list[str]:
    """The first paths of the file."""
    with lzma.open(options.data, "rt", encoding="utf-8") as lines:
        return [line.partition("\t")[0] for line in islice(lines, options.texts)]


def random_texts(options: argparse.Namespace) -> list[str]:
    """Letters and separators, each text of the same length."""
    source = random.Random(0)
    letters = string.ascii_lowercase + "/-. "
    return ["".join(source.choices(letters, k=options.bytes)) for _ in range(options.texts)]


def measured(hashing: FeatureHashing, texts: list[str]) -> float:
    """Seconds for all texts."""
    start = time.process_time()
    hashing(texts)
    return time.process_time() - start


if __name__ == "__main__":
    main()
