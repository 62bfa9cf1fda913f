"""Language models and skip-grams over words of WikiText-2 and of the Penn Treebank."""

import collections
import importlib
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import sketchoptim as so
from experiments.corpora.text_files import TextFile
from experiments.data import data_file

from .methods import Rates, build, scale_rates_, state_bytes
from .tasks import Result


@cache
def _wikitext(part: str) -> list[str]:
    path = data_file("wikitext-2")
    if path is None:
        raise FileNotFoundError("set SKETCHOPTIM_DATA to a folder with wikitext-2")
    names = (f"wiki.{part}.tokens", f"{part}.txt")
    file = next(path / name for name in names if (path / name).exists())
    return " ".join(TextFile(file).lines()).replace("\n", "<eos>").split()


@cache
def _treebank(part: str) -> list[str]:
    penn: dict[str, str] = importlib.import_module("treebank").penn
    return penn[part].replace("\n", "<eos>").split()


def _encoded(words: list[str], vocabulary: dict[str, int]) -> Tensor:
    return torch.tensor([vocabulary.get(word, 0) for word in words])


def _vocabulary(words: list[str], size: int) -> dict[str, int]:
    """The numbers of the most frequent words, from 1 on; 0 is for all others."""
    counts = collections.Counter(words).most_common(size - 1)
    return {word: number for number, (word, _) in enumerate(counts, start=1)}


# -- a Transformer with a tied table ---------------------------------------------------------------

_WORDS, _COLUMNS, _LENGTH, _TEXTS = 4_000, 64, 64, 16


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _COLUMNS)
        self.places = nn.Embedding(_LENGTH, _COLUMNS)
        layer = nn.TransformerEncoderLayer(
            _COLUMNS, 4, 4 * _COLUMNS, 0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(_COLUMNS)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.mask = nn.Transformer.generate_square_subsequent_mask(_LENGTH)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.layers(
            self.words(ids) + self.places.weight, mask=self.mask, is_causal=True
        )  # fmt: skip
        logits: Tensor = self.norm(hidden) @ self.words.weight.T
        return logits


def small_transformer(method: str, rates: Rates, seed: int, *, steps: int = 300) -> Result:
    """The validation loss of a tied Transformer over 4,000 words of WikiText-2."""
    vocabulary = _vocabulary(_wikitext("train"), _WORDS)
    train = _encoded(_wikitext("train"), vocabulary)
    valid = _encoded(_wikitext("valid")[:60_000], vocabulary)
    torch.manual_seed(seed)
    model, draws = _Transformer(), torch.Generator().manual_seed(seed)
    tables = ["words.weight"]
    optimizer = build(model, method, rates, tables=tables, is_decoupled=True)
    for step in range(steps):
        starts = torch.randint(len(train) - _LENGTH - 1, (_TEXTS,), generator=draws)
        texts = torch.stack([train[start : start + _LENGTH + 1] for start in starts])
        falling = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))
        scale_rates_(optimizer, min(1.0, (step + 1) / 50) * falling)
        optimizer.zero_grad()
        _word_loss(model(texts[:, :-1]), texts[:, 1:]).backward()
        so.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    texts = valid[: len(valid) // (_LENGTH + 1) * (_LENGTH + 1)].view(-1, _LENGTH + 1)
    with torch.no_grad():
        losses = [_word_loss(model(it[:, :-1]), it[:, 1:], "sum").item() for it in texts.split(64)]
    return Result(sum(losses) / texts[:, 1:].numel(), state_bytes(optimizer, tables))


def _word_loss(logits: Tensor, words: Tensor, reduction: str = "mean") -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction=reduction)


# -- an LSTM over the Penn Treebank ----------------------------------------------------------------


class _Lstm(nn.Module):
    """As the word language model of pytorch/examples, with sparse gradients of its input table."""

    def __init__(self, words: int, columns: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, columns, sparse=True)
        self.lstm = nn.LSTM(columns, columns, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.output = nn.Linear(columns, words)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        nn.init.uniform_(self.output.weight, -0.1, 0.1)

    def forward(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        hidden, state = self.lstm(self.dropout(self.words(ids)), state)
        return self.output(self.dropout(hidden)), state


def treebank_lstm(method: str, rates: Rates, seed: int, *, steps: int = 400) -> Result:
    """The validation loss of an LSTM over the 10,000 words of the Penn Treebank."""
    vocabulary = _vocabulary(_treebank("train"), 10_000)
    train, valid = (_encoded(_treebank(part), vocabulary) for part in ("train", "valid"))
    torch.manual_seed(seed)
    model = _Lstm(10_000)
    tables = ["words.weight", "output.weight"]
    optimizer = build(model, method, rates, tables=tables)
    state: Any = None
    batches = _text_batches(train, texts=10, length=20)
    for step, (ids, following) in zip(range(steps), batches, strict=False):
        scale_rates_(optimizer, 1 - step / steps)
        optimizer.zero_grad()
        logits, state = model(ids, state)
        state = tuple(it.detach() for it in state)
        _word_loss(logits, following).backward()
        so.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    losses, count, state = 0.0, 0, None
    with torch.no_grad():
        for ids, following in _text_batches(valid, texts=20, length=40):
            logits, state = model(ids, state)
            losses += _word_loss(logits, following, "sum").item()
            count += following.numel()
    return Result(losses / count, state_bytes(optimizer, tables))


def _text_batches(words: Tensor, *, texts: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Successive pieces of a text that was cut into `texts` columns, with the words after them."""
    size = (len(words) - 1) // texts
    ids, following = (words[at : at + texts * size].view(texts, size) for at in (0, 1))
    yield from zip(ids.split(length, 1), following.split(length, 1), strict=True)


# -- skip-grams ------------------------------------------------------------------------------------


class _SkipGrams(nn.Module):
    def __init__(self, words: int, columns: int = 64) -> None:
        super().__init__()
        self.inner = nn.Embedding(words, columns, sparse=True)
        self.outer = nn.Embedding(words, columns, sparse=True)
        nn.init.uniform_(self.inner.weight, -0.5 / columns, 0.5 / columns)
        nn.init.zeros_(self.outer.weight)

    def forward(self, centers: Tensor, contexts: Tensor, others: Tensor) -> Tensor:
        rows = self.inner(centers).unsqueeze(1)
        right = (rows * self.outer(contexts).unsqueeze(1)).sum(2)
        wrong = (rows * self.outer(others)).sum(2)
        loss = -functional.logsigmoid(right).sum() - functional.logsigmoid(-wrong).sum()
        return loss / len(centers)


def skip_gram(method: str, rates: Rates, seed: int, *, steps: int = 4_000) -> Result:
    """The held-out loss of skip-grams with five negatives over 12,000 words of WikiText-2."""
    words, negatives, batch, window = 12_000, 5, 512, 5
    vocabulary = _vocabulary(_wikitext("train"), words)
    train, valid = (_encoded(_wikitext(part), vocabulary) for part in ("train", "valid"))
    frequencies = torch.bincount(train, minlength=words).double().pow(0.75)
    torch.manual_seed(seed)
    model, draws = _SkipGrams(words), torch.Generator().manual_seed(seed)
    tables = ["inner.weight", "outer.weight"]
    optimizer = build(model, method, rates, tables=tables)

    def drawn(text: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        at = torch.randint(window, len(text) - window, (count,), generator=draws)
        away = torch.randint(1, window + 1, (count,), generator=draws)
        sides = torch.randint(0, 2, (count,), generator=draws) * 2 - 1
        others = torch.multinomial(frequencies, count * negatives, True, generator=draws)
        return text[at], text[at + away * sides], others.view(count, negatives)

    for step in range(steps):
        scale_rates_(optimizer, 1 - step / steps)
        optimizer.zero_grad()
        model(*drawn(train, batch)).backward()
        optimizer.step()
    draws.manual_seed(1_000_003)
    with torch.no_grad():
        losses = [model(*drawn(valid, 10_000)).item() for _ in range(10)]
    return Result(sum(losses) / len(losses), state_bytes(optimizer, tables))
