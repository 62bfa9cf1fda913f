"""Muon for the hidden matrices of a language model, and our AdamW for everything else.

    pip install sketchoptim
    python muon.py

Muon is for hidden matrices alone. Embeddings and output heads usually stay with AdamW, which keeps
8 bytes of state for each weight. Here they take half a byte per row.
"""

import argparse
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

import sketchoptim as so

DIM, LENGTH, BATCH = 64, 32, 16


class LanguageModel(nn.Module):
    """Logits of each next word, from a small transformer."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, DIM)
        self.positions = nn.Embedding(LENGTH, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(DIM, words, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.words(text) + self.positions.weight
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))

    def loss(self, text: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def read_sources() -> tuple[Tensor, int]:
    """The words of some of Python's own modules as ids, and the number of distinct words."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    words = re.findall(r"\w+|[^\w\s]+", text)
    ids = {word: number for number, (word, _) in enumerate(Counter(words).most_common())}
    return torch.tensor([ids[word] for word in words]), len(ids)


def main() -> None:
    """Trains, and ends with status 1 if the model did not learn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # the model is tiny: threads would wait for one another
    torch.manual_seed(0)
    text, words = read_sources()
    pieces = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    held_out, train = pieces[:100], pieces[100:]
    model = LanguageModel(words)

    heads = ["head.weight"]
    groups = so.param_groups(model, tables=heads, lr=0.03, no_decay=["bias", "norm"])
    embeddings = so.find_tables(model, min_rows=1, tables=heads)
    others = [(name, it) for name, it in model.named_parameters() if name not in embeddings]
    hidden = {name: it for name, it in others if it.dim() == 2}
    for group in groups:
        group["params"] = [(name, it) for name, it in group["params"] if name not in hidden]
    print(groups)
    optimizers = [torch.optim.Muon(hidden.items(), lr=0.02), so.AdamW(groups, lr=0.001)]
    schedules = [
        torch.optim.lr_scheduler.LinearLR(it, 1.0, 0.1, total_iters=steps) for it in optimizers
    ]
    with torch.no_grad():
        before = model.loss(held_out).item()
    for step in range(1, steps + 1):
        loss = model.loss(train[torch.randint(len(train), (BATCH,))])
        loss.backward()
        so.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedules):
            part.step()
        model.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    with torch.no_grad():
        after = model.loss(held_out).item()
    report = so.memory_report(optimizers[1])
    print(f"state beside Muon's: {report.state_bytes:,} bytes, of AdamW {report.exact_bytes:,}")
    print(f"loss on held-out text: {before:.2f} before training, {after:.2f} after")
    if after > before - 2:
        raise SystemExit("the model did not learn")


if __name__ == "__main__":
    main()
