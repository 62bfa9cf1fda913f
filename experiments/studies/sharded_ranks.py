"""A Transformer under FSDP2 on one process and on several: the same curve, and what it costs.

    python -m experiments.studies.sharded_ranks

Trains on WikiText-2 with a full softmax, so that both tables get dense gradients; both are lean.
All runs see the same words: on N processes each takes an N-th of every batch. One thread each.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import sketchoptim as so

from ..corpora import read_wikitext
from ..data import find_file
from ..errors import run_study
from ..transformer import Transformer, TransformerSettings

_PROFILED_STEPS = 10


class WithLoss(nn.Module):
    """The model with its loss as `forward`, which is where FSDP2 gathers weights."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.model.loss(inputs, labels, None, generator=None)[0]


def main(arguments: list[str] | None = None) -> None:
    """Runs each number of processes, one after the other, and compares them."""
    options = parse_arguments(arguments)
    if options.result is not None:
        train(options)
        return
    found = {count: run(count, options) for count in options.ranks}
    first = found[options.ranks[0]]
    print(f"{options.steps} steps of {options.batch} x {options.length} words, 1 thread a process")
    for count, it in found.items():
        apart = max(abs(a / b - 1) for a, b in zip(it["losses"], first["losses"], strict=True))
        print(f"\n{count} processes: {it['ms']:.0f} ms a step, {first['ms'] / it['ms']:.2f} x")
        print(f"  loss of the last 50 steps {statistics.mean(it['losses'][-50:]):.4f}, ", end="")
        print(f"validation {it['valid']:.4f}, furthest from the first run {apart:.1e}")
        print(f"  {it['step_ms']:.1f} ms are the optimizer's step; state of a process: ", end="")
        print(f"{it['table_bytes']:,} bytes for tables, {it['state_bytes']:,} in all")
        for name, (ms, size) in it["collectives"].items():
            print(f"  {name}: {ms:.1f} ms and {size:,.0f} bytes a step")


def run(count: int, options: argparse.Namespace) -> dict[str, Any]:
    """The result of a run on so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={count}", "-m", "experiments.studies.sharded_ranks"]
        command += [f"--{name}={getattr(options, name)}" for name in ("steps", "batch", "length")]
        subprocess.run([*command, f"--result={result}"], check=True)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def train(options: argparse.Namespace) -> None:
    """One process of a run; the first writes the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    corpus = read_wikitext(find_file("wikitext-2", expected="WikiText-2"))
    torch.manual_seed(0)
    sizes = TransformerSettings(is_tied=False, longest=options.length)
    model = Transformer(len(corpus.vocabulary), sizes)
    module = WithLoss(model)
    for layer in (model.embedding, *model.blocks, model.softmax):
        fully_shard(layer)
    fully_shard(module)
    tables = list(model.named_tables().values())
    named = {id(it) for it in tables}
    rest = [it for it in model.parameters() if id(it) not in named]
    optimizer = so.AdamW([{"params": tables, "memory": "lean"}, {"params": rest}], lr=1e-3)
    mine = slice(rank * options.batch // count, (rank + 1) * options.batch // count)
    losses, times, step_times = [], [], []
    profile: Any = None
    for step in range(options.steps):
        if step == options.steps - _PROFILED_STEPS:
            profile = torch.profiler.profile(record_shapes=True).__enter__()
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = module(*(it[mine] for it in batch(corpus.train, step, options)))
        loss.backward()
        so.clip_grad_norm_(module.parameters(), 1.0)
        ready = time.perf_counter()
        optimizer.step()
        ended = time.perf_counter()
        times.append(ended - began)
        step_times.append(ended - ready)
        losses.append(mean(loss.detach()))
    profile.__exit__(None, None, None)
    with torch.no_grad():
        valid = [module(*(it[mine] for it in batch(corpus.valid, i, options))) for i in range(50)]
    result = {
        "losses": losses,
        "valid": mean(torch.stack(valid).mean()),
        "ms": 1e3 * statistics.median(times[:-_PROFILED_STEPS]),
        "step_ms": 1e3 * statistics.median(step_times[:-_PROFILED_STEPS]),
        "table_bytes": sum(state_bytes(optimizer, it) for it in tables),
        "state_bytes": sum(state_bytes(optimizer, it) for it in model.parameters()),
        "collectives": collectives(profile),
    }
    if rank == 0:
        options.result.write_text(json.dumps(result))
    dist.destroy_process_group()


def batch(words: Tensor, step: int, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Inputs and labels ``[batch, length]`` of a step: the text, read on from batch to batch."""
    size = options.batch * options.length
    start = step * size % (len(words) - size - 1)
    inputs, labels = (words[start + shift : start + shift + size].long() for shift in (0, 1))
    return inputs.view(options.batch, -1), labels.view(options.batch, -1)


def mean(loss: Tensor) -> float:
    """The mean over all processes."""
    total = loss.clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def state_bytes(optimizer: so.AdamW, parameter: Tensor) -> int:
    """The bytes of a parameter's state in this process."""
    return sum(it.nbytes for it in optimizer.state[parameter].values() if isinstance(it, Tensor))


def collectives(profile: Any) -> dict[str, tuple[float, float]]:
    """Milliseconds and bytes a step of each kind of collective, waiting for others included."""
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profile.events():
        if event.name.startswith("gloo:"):
            elements = sum(torch.Size(shape).numel() for shape in event.input_shapes)
            found[event.name][0] += event.cpu_time_total / 1e3 / _PROFILED_STEPS
            found[event.name][1] += 4 * elements / _PROFILED_STEPS
    return {name: (ms, size) for name, (ms, size) in sorted(found.items())}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.steps <= _PROFILED_STEPS or any(options.batch % it for it in options.ranks):
        parser.error(f"steps must be above {_PROFILED_STEPS}, and batch a multiple of all ranks")
    return options


if __name__ == "__main__":
    run_study(main)
