"""The language model of the experiments: two large sparse tables around a small dense body."""

from dataclasses import dataclass

from torch import Tensor, nn

from ..nn import SampledSoftmax

State = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Sizes of a `LanguageModel`.

    Args:
        dim: length of a row of the input table.
        hidden: units of the LSTM and length of a row of the output table.
        samples: negatives a step of the sampled softmax.
    """

    dim: int = 256
    hidden: int = 256
    samples: int = 1024

    def __post_init__(self) -> None:
        for name in ("dim", "hidden", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


class LanguageModel(nn.Module):
    """The next word from the ones before: embedding -> LSTM -> sampled softmax.

    Both tables, and the output bias, get sparse gradients.

    Example:
        >>> model = LanguageModel(1000, ModelSettings(dim=16, hidden=16, samples=64))
        >>> import torch
        >>> words = torch.randint(1000, (4, 10))
        >>> hidden, state = model(words)
        >>> hidden.shape
        torch.Size([4, 10, 16])
    """

    def __init__(self, classes: int, settings: ModelSettings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, settings.dim, sparse=True)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.lstm = nn.LSTM(settings.dim, settings.hidden, batch_first=True)
        self.softmax = SampledSoftmax(settings.hidden, classes, samples=settings.samples, bias=True)

    def forward(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Hidden vectors [batch, length, hidden] for words [batch, length], and the last state."""
        hidden, last = self.lstm(self.embedding(words), state)
        return hidden, last

    def named_tables(self) -> dict[str, nn.Parameter]:
        """The parameters that get sparse gradients, by name."""
        body = self.named_body()
        return {name: table for name, table in self.named_parameters() if name not in body}

    def named_body(self) -> dict[str, nn.Parameter]:
        """The parameters that get dense gradients, by name."""
        return dict(self.lstm.named_parameters(prefix="lstm"))


def detached(state: State) -> State:
    """The same state, cut off from the graph that made it."""
    return state[0].detach(), state[1].detach()
