"""Users and the items they chose, as recommender benchmarks publish them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .corpus import Part


@dataclass(frozen=True)
class Pairs:
    """Pairs of a user and an item, in ascending order of users.

    Attributes:
        users: int64 [pairs].
        items: int64 [pairs].
    """

    users: Tensor
    items: Tensor

    def __len__(self) -> int:
        return len(self.users)

    def joined(self, other: "Pairs") -> "Pairs":
        """The pairs of both."""
        users, items = (
            torch.cat([getattr(self, name), getattr(other, name)]) for name in ("users", "items")
        )
        order = users.argsort(stable=True)
        return Pairs(users[order], items[order])

    def of_users(self, first: int, end: int) -> "Pairs":
        """The pairs of the users `first` to `end - 1`."""
        start, stop = torch.searchsorted(self.users, torch.tensor([first, end])).tolist()
        return Pairs(self.users[start:stop], self.items[start:stop])


@dataclass(frozen=True)
class Interactions:
    """Pairs in three parts.

    Attributes:
        users: How many there are.
        items: How many there are.
        train, valid, test: The parts; `valid` is empty where it was joined to `train`.
    """

    users: int
    items: int
    train: Pairs
    valid: Pairs
    test: Pairs

    def part(self, name: Part) -> Pairs:
        """One of the three."""
        found: Pairs = getattr(self, name)
        return found

    def with_valid_in_train(self) -> "Interactions":
        """The same with the validation pairs among the training pairs."""
        nothing = torch.empty(0, dtype=torch.int64)
        joined = self.train.joined(self.valid)
        return Interactions(self.users, self.items, joined, Pairs(nothing, nothing), self.test)


def read_interactions(folder: str | Path) -> Interactions:
    """A folder with `train.txt`, `valid.txt` and `test.txt`: a user and its items in each line."""
    train, valid, test = (
        _read(Path(folder) / f"{part}.txt") for part in ("train", "valid", "test")
    )
    users, items = (
        1 + max(int(getattr(part, name).max()) for part in (train, valid, test) if len(part))
        for name in ("users", "items")
    )
    return Interactions(users, items, train, valid, test)


def _read(path: Path) -> Pairs:
    users: list[int] = []
    items: list[int] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                user, *chosen = map(int, line.split())
            except ValueError:
                raise ValueError(
                    f"line {number} of {path} must be the number of a user and of its items, "
                    f"got {line[:80]!r}"
                ) from None
            users += [user] * len(chosen)
            items += chosen
    order = torch.tensor(users, dtype=torch.int64).argsort(stable=True)
    return Pairs(torch.tensor(users)[order], torch.tensor(items)[order])
