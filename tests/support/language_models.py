"""A small language model with tables that are found, and training that is the same everywhere."""

import torch
from torch import Tensor, nn

import sketchoptim as so

WORDS = 1003  # at least 1,000, so that its tables are tables, and not a multiple of any count


class LanguageModel(nn.Module):
    """An embedding, a hidden layer, a frozen one, and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 32)
        self.hidden, self.frozen = nn.Linear(32, 32), nn.Linear(32, 32).requires_grad_(False)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.frozen(self.hidden(self.embedding(words)))))

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def batches(count: int, *, start: int = 0) -> list[Tensor]:
    """Batches number `start` and on of an endless stream."""
    generator = torch.Generator().manual_seed(0)
    stream = [torch.randint(WORDS, (4, 16), generator=generator) for _ in range(start + count)]
    return stream[start:]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    words: list[Tensor],
    *,
    max_norm: float = 0.5,
) -> list[float]:
    """Trains, with clipping, on the same words in every process; returns the losses."""
    losses = []
    for batch in words:
        optimizer.zero_grad()
        logits = model(batch).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())
        loss.backward()
        so.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses
