"""A recommender: a table of users, a table of items, and sampled negatives.

    pip install sketchoptim
    python recommender.py

Users and items belong to hidden groups, and users pick items of their own group. The model sees the
picks alone. It learns to score a picked item above items that are drawn at random.
"""

import argparse

import torch
from torch import Tensor, nn

import sketchoptim as so

USERS, ITEMS, GROUPS, DIM = 30_000, 10_000, 20, 32
BATCH, NEGATIVES = 2048, 20


class Recommender(nn.Module):
    """Scores of user and item pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, DIM, sparse=True)
        self.items = nn.Embedding(ITEMS, DIM, sparse=True)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.users(users)[:, None] * self.items(items)).sum(-1)


def pick(count: int) -> tuple[Tensor, Tensor]:
    """Random users, and an item of each one's group; low ids are picked more often."""
    users = torch.randint(USERS, (count,))
    places = (torch.rand(count).square() * (ITEMS // GROUPS)).long()
    return users, places * GROUPS + users % GROUPS


def with_negatives(items: Tensor, count: int) -> Tensor:
    """Each item, and after it as many random ones, [picks, 1 + count]."""
    return torch.cat([items[:, None], torch.randint(ITEMS, (len(items), count))], dim=1)


@torch.no_grad()
def share_found(model: Recommender) -> float:
    """How often a picked item is among the best 10 of itself and 100 random ones."""
    users, items = pick(5000)
    scores = model(users, with_negatives(items, 100))
    return ((scores > scores[:, :1]).sum(1) < 10).float().mean().item()


def main() -> None:
    """Trains, and ends with status 1 if the model did not learn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model = Recommender()
    optimizer = so.Adam(model.named_parameters(), lr=0.03)  # instead of torch.optim.SparseAdam
    before = share_found(model)
    first_is_right = torch.zeros(BATCH, dtype=torch.int64)
    for step in range(1, steps + 1):
        users, items = pick(BATCH)
        scores = model(users, with_negatives(items, NEGATIVES))
        loss = nn.functional.cross_entropy(scores, first_is_right)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    after = share_found(model)
    print(so.memory_report(optimizer))
    print(f"picked items among the best 10 of 101: {before:.0%} before training, {after:.0%} after")
    if after < 2 * before:
        raise SystemExit("the model did not learn")


if __name__ == "__main__":
    main()
