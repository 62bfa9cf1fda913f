"""Runs that are saved on the way, and what their files give back."""

import functools
import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from tiny_runs import Plan, Run, batches
from torch import Tensor

STEPS, SAVED_AFTER = 7, 3  # the plans that fold do so at 2 and 5, those that clean at 3 and 6


def reloaded(*states: Any) -> Any:
    """What default `torch.load` makes of what `torch.save` wrote."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file)


@dataclass(frozen=True)
class Milestone:
    """An uninterrupted run: what was saved of it on the way, and the bits it came to."""

    checkpoint: bytes
    pickled: bytes
    bits_on_the_way: dict[str, Any]
    final_bits: dict[str, Any]


@functools.cache
def milestone(plan: Plan, dtype: torch.dtype = torch.float32) -> Milestone:
    """A run of the plan, made once."""
    run = Run.start(plan, dtype=dtype).train(batches(STEPS)[:SAVED_AFTER])
    file = io.BytesIO()
    torch.save((run.model.state_dict(), run.optimizer.state_dict()), file)
    pickled, bits = pickle.dumps((run.model, run.optimizer)), run.bits()
    run.train(batches(STEPS)[SAVED_AFTER:])
    return Milestone(file.getvalue(), pickled, bits, run.bits())


def storages_of(tree: Any) -> set[int]:
    """The addresses of the memory of all tensors in dicts, lists and tuples."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, Tensor):
        return {tree.untyped_storage().data_ptr()}
    if isinstance(tree, list | tuple):
        return set().union(*map(storages_of, tree))
    return set()
