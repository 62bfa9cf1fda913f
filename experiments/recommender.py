"""The recommenders of the experiments: matrix factorisation and LightGCN, and their ranking."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from .corpora import Interactions, Pairs
from .models import Model


@dataclass(frozen=True, kw_only=True)
class RecommenderSettings:
    """Sizes of a `Recommender`.

    Args:
        dim: columns of the tables of users and of items.
        samples: random items of a step, which all users of the batch share as negatives.
        temperature: by which the cosine of user and item is divided.
        at: how many items are recommended to a user when quality is measured.
        layers: of LightGCN's graph convolution; with 0 it is matrix factorisation. With layers the
            tables get dense gradients.
    """

    dim: int = 64
    samples: int = 256
    temperature: float = 0.1
    at: int = 20
    layers: int = 0

    def __post_init__(self) -> None:
        for name in ("dim", "samples", "at"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.layers < 0:
            raise ValueError(f"layers must be >= 0, got {self.layers}")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be > 0, got {self.temperature}")


class Recommender(Model):
    """The items of a user, by the cosine of a user's vector and an item's vector.

    A vector is a row of a table, or with layers the mean of the row and of what the layers make of
    it: each replaces all vectors by weighted sums of those of their neighbours in the graph of
    users and items. The loss of a pair is the cross entropy of its item among itself and `samples`
    items drawn uniformly.

    Args:
        users, items: rows of the tables.
        settings: sizes.
        pairs: the graph's edges; needed with layers alone.

    Example:
        >>> model = Recommender(10, 20, RecommenderSettings(dim=4, samples=8))
        >>> loss, _ = model.loss(torch.arange(3), torch.arange(3), None, generator=None)
        >>> loss.backward()
        >>> model.items.weight.grad.is_sparse
        True
    """

    def __init__(
        self, users: int, items: int, settings: RecommenderSettings, pairs: Pairs | None = None
    ) -> None:
        super().__init__()
        self.settings = settings
        self.users = nn.Embedding(users, settings.dim, sparse=not settings.layers)
        self.items = nn.Embedding(items, settings.dim, sparse=not settings.layers)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        self.graph: Tensor | None = None
        if settings.layers:
            assert pairs is not None
            self.graph = normalized_graph(pairs, users, items)

    def vectors(self) -> tuple[Tensor, Tensor]:
        """The vectors of all users and of all items."""
        layer = total = torch.cat([self.users.weight.float(), self.items.weight.float()])
        for _ in range(self.settings.layers):
            layer = _Propagate.apply(self.graph, layer)  # type: ignore[no-untyped-call]
            total = total + layer
        mean = total / (self.settings.layers + 1)
        users, items = mean.split([self.users.num_embeddings, self.items.num_embeddings])
        return users, items

    def loss(
        self, inputs: Tensor, labels: Tensor, state: None, *, generator: Generator | None
    ) -> tuple[Tensor, None]:
        """The loss of users `inputs` and their items `labels`; there is no state."""
        drawn = torch.randint(
            self.items.num_embeddings,
            (self.settings.samples,),
            generator=generator,
            device=labels.device,
        )
        chosen = torch.cat([labels, drawn])
        if self.graph is None:
            users, items = self.users(inputs), self.items(chosen)
        else:
            all_users, all_items = self.vectors()
            users, items = all_users[inputs], all_items[chosen]
        users = directions(users)
        right, wrong = directions(items).split([len(labels), len(drawn)])
        others = (users @ wrong.T).masked_fill(drawn == labels[:, None], -torch.inf)
        logits = torch.cat([(users * right).sum(1, keepdim=True), others], dim=1)
        first = torch.zeros_like(labels)
        return F.cross_entropy(logits / self.settings.temperature, first), None

    def named_tables(self) -> dict[str, nn.Parameter]:
        """Both tables."""
        return dict(self.named_parameters())


class _Propagate(torch.autograd.Function):
    """The product of a symmetric sparse matrix with vectors."""

    @staticmethod
    def forward(ctx: Any, graph: Tensor, vectors: Tensor) -> Tensor:
        ctx.graph = graph
        return graph @ vectors

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, ctx.graph @ gradient


def normalized_graph(pairs: Pairs, users: int, items: int) -> Tensor:
    """D^-1/2 A D^-1/2 in sparse rows, of the graph whose first nodes are users, then items."""
    ends = torch.cat([torch.stack([pairs.users, pairs.items + users])] * 2, dim=1)
    ends[:, len(pairs) :] = ends[:, len(pairs) :].flip(0)
    degrees = torch.bincount(ends[0], minlength=users + items).float()
    weights = (degrees[ends[0]] * degrees[ends[1]]).rsqrt()
    size = users + items
    order = (ends[0] * size + ends[1]).argsort()
    first, second = ends[:, order]
    starts = torch.cat([torch.zeros(1).long(), torch.bincount(first, minlength=size).cumsum(0)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            starts, second, weights[order], (size, size), check_invariants=False
        )


@dataclass(frozen=True)
class Ranking:
    """The quality of recommendations, each a mean over users.

    Attributes:
        recall: Share of a user's items that were recommended.
        ndcg: Discounted gain of the recommendations over that of the best possible ones.
    """

    recall: float
    ndcg: float


@torch.no_grad()
def rank_items(
    model: Recommender, data: Interactions, wanted: Pairs, known: Pairs, *, limit: int
) -> Ranking:
    """How well the best items that are not `known` match the `wanted` ones.

    All items are ranked for each of the first `limit` users, of whom those without wanted items
    are left out.
    """
    at = model.settings.at
    users, items = map(directions, model.vectors())
    discounts = 1 / torch.arange(2, at + 2, dtype=torch.float64).log2()
    recalls, gains = [], []
    for start in range(0, min(limit, data.users), 512):
        end = min(start + 512, limit, data.users)
        here, seen = wanted.of_users(start, end), known.of_users(start, end)
        scores = users[start:end] @ items.T
        scores[seen.users - start, seen.items] = -torch.inf
        best = scores.topk(at).indices.cpu()
        keys = here.users * data.items + here.items
        hits = torch.isin(torch.arange(start, end)[:, None] * data.items + best, keys).double()
        counts = torch.bincount(here.users - start, minlength=end - start)
        has_items = counts > 0
        hits, counts = hits[has_items], counts[has_items]
        recalls.append(hits.sum(1) / counts)
        ideal = discounts.cumsum(0)[counts.clamp(max=at) - 1]
        gains.append((hits * discounts).sum(1) / ideal)
    return Ranking(torch.cat(recalls).mean().item(), torch.cat(gains).mean().item())


def directions(rows: Tensor) -> Tensor:
    """The rows in float32, each of norm one."""
    return F.normalize(rows.float(), dim=-1)
