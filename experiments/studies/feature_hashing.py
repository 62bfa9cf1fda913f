"""How many short texts a second are hashed, on one core.

    python -m experiments.studies.feature_hashing

Texts are Debian's paths, 61 bytes on average, or with --bytes random letters of that length.
Numbers are medians of processor time, which other processes affect little.
"""

import argparse
import random
import statistics
import string
import time
from itertools import islice
from pathlib import Path

import torch

from sketchoptim.nn import FeatureHashing

from ..corpora import labelled_file
from ..data import find_data
from ..errors import run_study
from ..recipes import load_recipe

DATA = load_recipe("amazon-mach").sizes["small"].data


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for each kind of features."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    texts = random_texts(options) if options.bytes else paths(options)
    mean = statistics.mean(len(text.encode()) for text in texts)
    print(f"{len(texts):,} texts of {mean:.1f} bytes on average")
    for unit in ("trigrams", "words"):
        for signed in (False, True):
            hashing = FeatureHashing(unit=unit, signed=signed)
            seconds = [measure_seconds(hashing, texts) for _ in range(options.repetitions)]
            rate = len(texts) / statistics.median(seconds)
            print(
                f"{unit:<10}{'signed' if signed else 'unsigned':<10}{rate:>12,.0f} texts a second"
            )


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with train.tsv: path<TAB>package")
    parser.add_argument("--bytes", type=int, help="length of random texts, instead of paths")
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--repetitions", type=int, default=7)
    return parser.parse_args(arguments)


def paths(options: argparse.Namespace) -> list[str]:
    """The first paths of the training data."""
    lines = labelled_file(find_data(DATA, options.data), "train").lines()
    return [line.partition("\t")[0] for line in islice(lines, options.texts)]


def random_texts(options: argparse.Namespace) -> list[str]:
    """Letters and separators, each text of the same length."""
    source = random.Random(0)
    letters = string.ascii_lowercase + "/-. "
    return ["".join(source.choices(letters, k=options.bytes)) for _ in range(options.texts)]


def measure_seconds(hashing: FeatureHashing, texts: list[str]) -> float:
    """Processor time to hash all texts."""
    start = time.process_time()
    hashing(texts)
    return time.process_time() - start


if __name__ == "__main__":
    run_study(main)
