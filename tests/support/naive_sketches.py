"""The sketches the slow way: one id and one bucket at a time, in float64.

Nothing here is lazy or shared with the library: counters scale element by element, and hashes are
those of `hash_specification`, in Python's integers.
"""

import functools
from collections.abc import Iterable

import numpy as np
from hash_specification import bucket_of, sign_of, words_of


class Hash:
    """The buckets and signs of one parameter's row ids."""

    def __init__(self, seed: int, parameter: int | str, depth: int) -> None:
        self.depth = depth
        self.words = [words_of(seed, parameter, j) for j in range(depth)]

    @functools.cache  # noqa: B019 - a hash lives as long as its test
    def bucket(self, j: int, i: int, width: int) -> int:
        return bucket_of(self.words[j], i, width)

    @functools.cache  # noqa: B019
    def sign(self, j: int, i: int) -> int:
        return sign_of(self.words[j], i)


class CountSketch:
    """UPDATE and QUERY of Algorithm 1 with signs and the median."""

    def __init__(self, hashes: Hash, width: int, dim: int, fill: float = 0.0) -> None:
        self.hashes = hashes
        self.counters = np.full((hashes.depth, width, dim), fill)

    def bucket(self, j: int, i: int) -> int:
        return self.hashes.bucket(j, i, self.counters.shape[1])

    def sign(self, j: int, i: int) -> int:
        return self.hashes.sign(j, i)

    def update(self, i: int, delta: np.ndarray) -> None:
        for j in range(self.hashes.depth):
            self.counters[j, self.bucket(j, i)] += self.sign(j, i) * delta

    def add(self, updates: Iterable[tuple[int, np.ndarray]]) -> None:
        for i, value in updates:
            self.update(i, value)

    def readings(self, i: int) -> list[np.ndarray]:
        depth = self.hashes.depth
        return [self.sign(j, i) * self.counters[j, self.bucket(j, i)] for j in range(depth)]

    def query(self, i: int) -> np.ndarray:
        return np.median(self.readings(i), axis=0)

    def scale(self, factor: float) -> None:
        self.counters *= factor

    def fold(self) -> None:
        depth, width, dim = self.counters.shape
        folded = np.zeros((depth, width // 2, dim))
        for j in range(depth):
            for bucket in range(width // 2):
                folded[j, bucket] = self.joined(*self.counters[j, 2 * bucket : 2 * bucket + 2])
        self.counters = folded

    def joined(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return left + right


class CountMin(CountSketch):
    """The same without signs and with the minimum."""

    def sign(self, j: int, i: int) -> int:
        return 1

    def query(self, i: int) -> np.ndarray:
        return np.min(self.readings(i), axis=0)


class ConservativeCountMin(CountMin):
    """A count-min whose buckets are raised to a target instead of added to."""

    def add(self, updates: Iterable[tuple[int, np.ndarray]]) -> None:
        """One update: equal ids are summed, and all are read before any bucket is raised."""
        sums: dict[int, np.ndarray] = {}
        for i, value in updates:
            sums[i] = sums.get(i, 0.0) + value
        targets = {i: self.query(i) + value for i, value in sums.items()}
        for i, target in targets.items():
            self.raise_to(i, target)

    def raise_to(self, i: int, target: np.ndarray) -> None:
        for j in range(self.hashes.depth):
            bucket = self.bucket(j, i)
            self.counters[j, bucket] = np.maximum(self.counters[j, bucket], target)

    def joined(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return np.maximum(left, right)
