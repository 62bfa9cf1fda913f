"""Words by descending count, so that a word's id is its rank."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"
END_OF_FILE = "<eof>"


@dataclass(frozen=True)
class Vocabulary:
    """Words by descending count, so that an id is a rank, as the log-uniform sampler expects.

    Example:
        >>> vocabulary = Vocabulary.from_words("b a b c b a".split(), min_count=2)
        >>> vocabulary.words
        ('b', 'a', '<unk>')
        >>> vocabulary.encode(["a", "c", "never seen"])
        tensor([1, 2, 2])
    """

    words: tuple[str, ...]
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = {word: rank for rank, word in enumerate(self.words)}
        if len(ids) != len(self.words):
            raise ValueError("words must be distinct, got repeated ones")
        if UNKNOWN not in ids:
            raise ValueError(f"words must contain {UNKNOWN!r}, which stands for all others")
        object.__setattr__(self, "_ids", ids)

    @classmethod
    def from_words(cls, words: Iterable[str], *, min_count: int = 1) -> "Vocabulary":
        """The vocabulary of all words seen `min_count` times; rarer ones count as unknown."""
        return cls.from_counts(Counter(words), min_count=min_count)

    @classmethod
    def from_counts(cls, counts: dict[str, int], *, min_count: int = 1) -> "Vocabulary":
        """The vocabulary of all words with a count of at least `min_count`."""
        if min_count < 1:
            raise ValueError(f"min_count must be >= 1, got {min_count}")
        kept = {word: count for word, count in counts.items() if count >= min_count}
        rare = sum(counts.values()) - sum(kept.values())
        kept[UNKNOWN] = kept.get(UNKNOWN, 0) + rare
        # the word breaks ties, so that ids do not depend on the order of the text
        return cls(tuple(sorted(kept, key=lambda word: (-kept[word], word))))

    def __len__(self) -> int:
        return len(self.words)

    def id(self, word: str) -> int:
        """The word's id, or that of the unknown word."""
        return self._ids.get(word, self._ids[UNKNOWN])

    def encode(self, words: Sequence[str]) -> Tensor:
        """The words' ids, int64 [len(words)]."""
        ids = np.fromiter(map(self.id, words), dtype=np.int64, count=len(words))
        return torch.from_numpy(ids)
