"""A language model whose rows several processes divide among them by FSDP2, saved and restored.

    pip install sketchoptim
    torchrun --nproc-per-node 2 fsdp2.py

Each process holds a half of every table, and a sketch of half a byte per row of all of them. The
checkpoint loads on any number of processes.
"""

import argparse
import re
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import sketchoptim as so

DIM, LENGTH, BATCH = 64, 32, 8


class LanguageModel(nn.Module):
    """The loss of each next word, from a small transformer."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, DIM)
        self.positions = nn.Embedding(LENGTH, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(DIM, words, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.words(text[:, :-1]) + self.positions.weight
        logits = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def read_sources() -> tuple[Tensor, int]:
    """The words of some of Python's own modules as ids, and the number of distinct words."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    words = re.findall(r"\w+|[^\w\s]+", text)
    ids = {word: number for number, (word, _) in enumerate(Counter(words).most_common())}
    return torch.tensor([ids[word] for word in words]), len(ids)


def build(words: int) -> tuple[nn.Module, so.AdamW]:
    """The model, divided among the processes, and its optimizer, made after that."""
    torch.manual_seed(0)  # the same weights in all processes
    model = fully_shard(LanguageModel(words))
    return model, so.AdamW(so.param_groups(model, tables=["head.weight"], lr=0.03), lr=0.001)


def main() -> None:
    """Trains, and ends with status 1 if the model did not learn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    dist.init_process_group("gloo")  # "nccl" on GPUs
    text, words = read_sources()
    pieces = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    held_out, train = pieces[:100], pieces[100 + dist.get_rank() :: dist.get_world_size()]
    model, optimizer = build(words)
    with torch.no_grad():
        before = model(held_out).item()
    for _ in range(parser.parse_args().steps):
        optimizer.zero_grad()
        model(train[torch.randint(len(train), (BATCH,))]).backward()
        so.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        after = model(held_out).item()
    with tempfile.TemporaryDirectory() as folder:
        dist.broadcast_object_list(shared := [folder])  # that of the first process
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=shared[0])
        model, optimizer = build(words)
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=shared[0])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    if dist.get_rank() == 0:
        report = so.memory_report(optimizer)
        print(f"state here: {report.state_bytes:,} bytes, of AdamW {report.exact_bytes:,}")
        print(f"loss on held-out text: {before:.2f} before training, {after:.2f} after")
    dist.destroy_process_group()
    if after > before - 1:
        raise SystemExit("the model did not learn")


if __name__ == "__main__":
    main()
