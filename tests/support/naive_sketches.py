"""Both sketches the slow way: a dict of numbers, one id at a time, hashed in Python integers."""

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from hash_specification import bucket_of, sign_of, words_of

Vector = list[float]
Update = tuple[int, Vector]


class NaiveSketch:
    """What both share; `numbers` maps (hash row, bucket, column) to a number."""

    def __init__(self, depth: int, width: int, dim: int, seed: int = 0) -> None:
        self.width, self.dim = width, dim
        self.words = [words_of(seed, 0, row) for row in range(depth)]
        self.numbers: dict[tuple[int, int, int], float] = defaultdict(float)

    def places(self, row_id: int) -> list[tuple[int, int]]:
        """The hash rows with the id's bucket in each."""
        return [(row, bucket_of(w, row_id, self.width)) for row, w in enumerate(self.words)]

    def sign(self, row: int, row_id: int) -> int:
        raise NotImplementedError

    def combine(self, readings: Vector) -> float:
        raise NotImplementedError

    def add(self, updates: Iterable[Update]) -> None:
        for row_id, vector in updates:
            for row, bucket in self.places(row_id):
                for column, value in enumerate(vector):
                    self.numbers[row, bucket, column] += self.sign(row, row_id) * value

    def query(self, row_id: int) -> Vector:
        return [
            self.combine(
                [
                    self.sign(row, row_id) * self.numbers[row, bucket, column]
                    for row, bucket in self.places(row_id)
                ]
            )
            for column in range(self.dim)
        ]

    def scale(self, factor: float) -> None:
        for place in self.numbers:
            self.numbers[place] *= factor

    def fold(self) -> None:
        self.width //= 2
        unfolded, self.numbers = self.numbers, defaultdict(float)
        for (row, bucket, column), number in unfolded.items():
            place = (row, bucket // 2, column)
            self.numbers[place] = self.folded(self.numbers[place], number)

    def folded(self, one: float, other: float) -> float:
        return one + other


class NaiveCountSketch(NaiveSketch):
    def sign(self, row: int, row_id: int) -> int:
        return sign_of(self.words[row], row_id)

    def combine(self, readings: Vector) -> float:
        return median(readings)


class NaiveCountMin(NaiveSketch):
    def sign(self, row: int, row_id: int) -> int:
        return 1

    def combine(self, readings: Vector) -> float:
        return min(readings)


class NaiveConservativeCountMin(NaiveCountMin):
    """One `add` is one update: all ids are read before any bucket is raised."""

    def add(self, updates: Iterable[Update]) -> None:
        sums: dict[int, Vector] = {}
        for row_id, vector in updates:
            old = sums.get(row_id, [0.0] * self.dim)
            sums[row_id] = [a + b for a, b in zip(old, vector, strict=True)]
        targets = {
            row_id: [a + b for a, b in zip(self.query(row_id), vector, strict=True)]
            for row_id, vector in sums.items()
        }
        for row_id, target in targets.items():
            for row, bucket in self.places(row_id):
                for column, value in enumerate(target):
                    place = (row, bucket, column)
                    self.numbers[place] = max(self.numbers[place], value)

    def folded(self, one: float, other: float) -> float:
        return max(one, other)
