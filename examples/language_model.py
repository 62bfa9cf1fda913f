"""A language model with a sampled softmax, over the sources of Python's standard library.

    pip install sketchoptim
    python language_model.py

Both tables, of input words and of output words, have sparse gradients, so the optimizer compresses
the state of both. The LSTM between them has dense gradients and keeps Adam's state.
"""

import argparse
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

import sketchoptim as so

DIM, STREAMS, LENGTH = 128, 32, 32


class LanguageModel(nn.Module):
    """The loss of predicting each next word."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, DIM, sparse=True)
        self.lstm = nn.LSTM(DIM, DIM, batch_first=True)
        self.softmax = so.nn.SampledSoftmax(DIM, words, samples=512, bias=True)

    def forward(self, text: Tensor) -> Tensor:
        return self.softmax(self.lstm(self.embedding(text[:, :-1]))[0], text[:, 1:])

    @torch.no_grad()
    def perplexity(self, text: Tensor) -> float:
        """Of the full softmax: a sampled loss is no measure of quality."""
        hidden, _ = self.lstm(self.embedding(text[:, :-1]))
        return self.softmax.full_loss(hidden, text[:, 1:]).exp().item()


def read_sources() -> tuple[Tensor, int]:
    """The words of Python's own modules as ids, the most frequent one first, and their number."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    words = re.findall(r"\w+|[^\w\s]+", text)
    ids = {word: number for number, (word, _) in enumerate(Counter(words).most_common())}
    return torch.tensor([ids[word] for word in words]), len(ids)


def main() -> None:
    """Trains, and ends with status 1 if the model did not learn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    text, words = read_sources()
    print(f"{len(text):,} words, {words:,} of them distinct")
    train, held_out = text[:-4096], text[-4096:].view(STREAMS, -1)
    model = LanguageModel(words)
    optimizer = so.Adam(so.param_groups(model, lr=0.03), lr=0.003)  # of the tables, of the LSTM
    before = model.perplexity(held_out)
    for step in range(1, steps + 1):
        starts = torch.randint(len(train) - LENGTH, (STREAMS, 1))
        loss = model(train[starts + torch.arange(LENGTH + 1)])
        optimizer.zero_grad()
        loss.backward()
        so.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: sampled loss {loss.item():.3f}")
    after = model.perplexity(held_out)
    print(so.memory_report(optimizer))
    print(f"held-out perplexity: {before:,.0f} before training, {after:,.0f} after")
    if after > before / 10:
        raise SystemExit("the model did not learn")


if __name__ == "__main__":
    main()
