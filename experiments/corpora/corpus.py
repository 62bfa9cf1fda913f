"""A text in three parts, as tensors of word ids, and how it is cut into batches."""

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .vocabulary import Vocabulary

Part = Literal["train", "valid", "test"]


@dataclass(frozen=True)
class Corpus:
    """A text in three parts, each a tensor of word ids, int64 or int32 [words].

    The ids may be mapped from a file: nothing here copies more than a batch of them.
    """

    vocabulary: Sized
    train: Tensor
    valid: Tensor
    test: Tensor

    @classmethod
    def from_words(
        cls,
        vocabulary: Vocabulary,
        *,
        train: Sequence[str],
        valid: Sequence[str],
        test: Sequence[str],
    ) -> "Corpus":
        """The corpus of three lists of words."""
        return cls(vocabulary, *(vocabulary.encode(words) for words in (train, valid, test)))

    def batches(self, *, batch: int, length: int) -> int:
        """How many batches a pass over the training text has."""
        return segment_count(self.train, batch=batch, length=length)

    def batch(self, number: int, *, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """The training words of a step and the words after them: passes follow one another."""
        within = number % self.batches(batch=batch, length=length)
        return segment(self.train, within, batch=batch, length=length)


def segments(ids: Tensor, *, batch: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs (words, next words), each [batch, <= length]: `batch` parallel passes over a text.

    The text is cut into `batch` equal streams; a pair continues where the one before it ended, so
    a recurrent state can be carried over.
    """
    for number in range(segment_count(ids, batch=batch, length=length)):
        yield segment(ids, number, batch=batch, length=length)


def segment_count(ids: Tensor, *, batch: int, length: int) -> int:
    """How many pairs `segments` gives."""
    stream_length = (ids.numel() - 1) // batch
    if stream_length < 1:
        raise ValueError(f"the text must have more than batch = {batch} words, got {ids.numel()}")
    return -(-stream_length // length)


def segment(ids: Tensor, number: int, *, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Pair number `number` of `segments`, found at once wherever it lies; int64."""
    stream_length = (ids.numel() - 1) // batch
    words = ids[: batch * stream_length].view(batch, stream_length)
    nexts = ids[1 : batch * stream_length + 1].view(batch, stream_length)
    here = slice(number * length, (number + 1) * length)
    return words[:, here].long(), nexts[:, here].long()
