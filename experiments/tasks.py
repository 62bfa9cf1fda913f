"""Tasks: batches for a step, a model for them, and a measure of its quality."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sketchoptim.nn import Aggregation, Bags, recall

from .classifier import Classifier, ClassifierSettings
from .corpora import (
    Corpus,
    Interactions,
    LabelledTexts,
    LabelledVectors,
    NoisyViews,
    Part,
    segments,
    shuffled,
)
from .models import LanguageModel, Model, ModelSettings, State
from .recommender import Recommender, RecommenderSettings, rank_items
from .text_classifier import TextClassifier, TextClassifierSettings
from .transformer import Transformer, TransformerSettings

Inputs = Tensor | Bags


class Task(Protocol):
    """The interface of a task for the training loop."""

    held_out: tuple[Part, ...] = ("valid", "test")
    """The parts that quality can be measured on."""

    def model(self) -> Model:
        """A new model, with random weights from torch's generator."""
        ...

    def batches(self, *, batch: int, length: int) -> int:
        """How many batches a pass over the training data has."""
        ...

    def batch(self, number: int, *, batch: int, length: int) -> tuple[Inputs, Tensor]:
        """Inputs and labels of step `number`, whatever the earlier calls."""
        ...

    def measure(self, model: Model, part: Part, *, limit: int) -> float:
        """The error of the model on `limit` words or examples of a part; lower is better."""
        ...

    def measures(self, model: Model, part: Part, *, limit: int) -> dict[str, float]:
        """What `measure` gives, as "quality", and further measures by name."""
        return {"quality": self.measure(model, part, limit=limit)}


@dataclass(frozen=True)
class NextWords(Task):
    """The next word of a text, measured by perplexity."""

    corpus: Corpus
    settings: ModelSettings | TransformerSettings

    def model(self) -> LanguageModel | Transformer:
        """A language model over the text's vocabulary."""
        words = len(self.corpus.vocabulary)
        if isinstance(self.settings, TransformerSettings):
            return Transformer(words, self.settings)
        return LanguageModel(words, self.settings)

    def batches(self, *, batch: int, length: int) -> int:
        """Batches a pass."""
        return self.corpus.batches(batch=batch, length=length)

    def batch(self, number: int, *, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Words and the words after them."""
        return self.corpus.batch(number, batch=batch, length=length)

    def measure(self, model: Model, part: Part, *, limit: int) -> float:
        """Perplexity."""
        assert isinstance(model, LanguageModel | Transformer)
        return perplexity(model, getattr(self.corpus, part), words=limit)


@dataclass(frozen=True)
class ClassOfView(Task):
    """The class of a vector, or of the vector it is a noisy view of, by the errors in percent."""

    views: NoisyViews | LabelledVectors
    settings: ClassifierSettings

    def model(self) -> Classifier:
        """A classifier over the views' classes."""
        return Classifier(self.views.dim, self.views.classes, self.settings)

    def batches(self, *, batch: int, length: int) -> int:
        """Batches a pass; `length` is not used."""
        return math.ceil(self.views.examples / batch)

    def batch(self, number: int, *, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Views [batch, dim] and their classes."""
        return self.views.batch("train", number, batch)

    @torch.no_grad()
    def measure(self, model: Model, part: Part, *, limit: int) -> float:
        """Percent of views whose largest logit is another class's."""
        assert isinstance(model, Classifier)
        views, classes = self.views.batch(part, 0, limit)
        best = model.softmax.top_k(views.to(model.device), 1)[:, 0]
        return 100 * (best.cpu() != classes).double().mean().item()


@dataclass(frozen=True)
class ClassOfText(Task):
    """The class of a text, measured by the percentage of texts without it among the best."""

    texts: LabelledTexts
    settings: TextClassifierSettings

    def model(self) -> TextClassifier:
        """A classifier over the texts' classes."""
        return self.settings.model(self.texts.classes)

    def batches(self, *, batch: int, length: int) -> int:
        """Batches a pass; `length` is not used."""
        return math.ceil(len(self.texts.train) / batch)

    def batch(self, number: int, *, batch: int, length: int) -> tuple[Bags, Tensor]:
        """Bags of features and their classes; texts come in strides, since neighbours are alike.

        The stride and the number of texts have no common divisor, so that every text comes once
        before any comes again.
        """
        size = len(self.texts.train)
        stride = round(size * (math.sqrt(5) - 1) / 2)
        while math.gcd(stride, size) > 1:
            stride += 1
        rows = (torch.arange(number * batch, (number + 1) * batch) * stride) % size
        return self._bags("train", rows)

    def measure(self, model: Model, part: Part, *, limit: int) -> float:
        """Percent of texts whose class is not among the `settings.at` best."""
        return self.measures(model, part, limit=limit)["quality"]

    def measures(self, model: Model, part: Part, *, limit: int) -> dict[str, float]:
        """Recall at 1, at 10 and at `settings.at` too."""
        assert isinstance(model, TextClassifier)
        at = self.settings.at
        best, classes = self.rank(model, part, at, limit=limit)
        recalls = {k: recall(best[:, :k], classes) for k in (1, 10, at) if k <= at}
        further = {f"recall_at_{k}": found for k, found in recalls.items()}
        return {"quality": 100 * (1 - recalls[at]), **further}

    @torch.no_grad()
    def rank(
        self,
        model: TextClassifier,
        part: Part,
        k: int,
        *,
        limit: int,
        aggregation: Aggregation = "mean",
    ) -> tuple[Tensor, Tensor]:
        """The `k` best classes [texts, k] of `limit` texts of a part, and the right ones."""
        rows = torch.arange(min(limit, len(self.texts.part(part))))
        candidates = self._candidates(self.texts.part(part).labels[rows].long())
        device = next(model.parameters()).device
        found, right = [], []
        for some in rows.split(512):
            bags, classes = self._bags(part, some)
            best = model.top_k(bags.to(device), k, aggregation=aggregation, candidates=candidates)
            found.append(best.cpu())
            right.append(classes)
        return torch.cat(found), torch.cat(right)

    def _candidates(self, right: Tensor) -> Tensor | None:
        """The right classes and `settings.candidates` random ones; None for all."""
        if not self.settings.candidates:
            return None
        drawn = shuffled(self.texts.classes, 0)[: self.settings.candidates]
        both: Tensor = torch.cat([right, drawn]).unique()
        return both

    def _bags(self, part: Part, rows: Tensor) -> tuple[Bags, Tensor]:
        texts, classes = self.texts.part(part).take(rows)
        return self.settings.hashing(texts), classes


@dataclass(frozen=True)
class ItemsOfUser(Task):
    """The items of a user, measured by the percentage that is not recommended."""

    data: Interactions
    settings: RecommenderSettings

    @property
    def held_out(self) -> tuple[Part, ...]:  # type: ignore[override]
        """Test alone where the validation pairs are trained on."""
        return ("valid", "test") if len(self.data.valid) else ("test",)

    def model(self) -> Recommender:
        """A recommender of these items to these users."""
        return Recommender(self.data.users, self.data.items, self.settings, self.data.train)

    def batches(self, *, batch: int, length: int) -> int:
        """Whole batches a pass; `length` is not used."""
        return len(self.data.train) // batch

    def batch(self, number: int, *, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Users and items of random pairs: each pair comes at most once in a pass."""
        epoch, within = divmod(number, self.batches(batch=batch, length=length))
        here = shuffled(len(self.data.train), epoch)[within * batch : (within + 1) * batch]
        return self.data.train.users[here], self.data.train.items[here]

    def measure(self, model: Model, part: Part, *, limit: int) -> float:
        """Percent of the items of the first `limit` users that are not recommended to them."""
        return self.measures(model, part, limit=limit)["quality"]

    def measures(self, model: Model, part: Part, *, limit: int) -> dict[str, float]:
        """Recall and NDCG too; items that a user is known to have chosen are not recommended."""
        assert isinstance(model, Recommender)
        known = self.data.train if part == "valid" else self.data.train.joined(self.data.valid)
        found = rank_items(model, self.data, self.data.part(part), known, limit=limit)
        missed = 100 * (1 - found.recall)
        return {"quality": missed, "recall": found.recall, "ndcg": found.ndcg}


@torch.no_grad()
def perplexity(
    model: LanguageModel | Transformer, ids: Tensor, *, words: int | None = None
) -> float:
    """exp of the mean full-softmax loss over the first `words` words of a text, all if None."""
    device = model.embedding.weight.device
    state: State | None = None
    total, count = 0.0, 0
    was_training = model.training
    model.eval()
    for inputs, labels in segments(ids[:words], batch=16, length=64):
        hidden, state = model(inputs.to(device), state)
        total += model.softmax.full_loss(hidden, labels.to(device), reduction="sum").item()
        count += labels.numel()
    model.train(was_training)
    return math.exp(min(total / count, 700.0))  # exp of a diverged loss overflows
