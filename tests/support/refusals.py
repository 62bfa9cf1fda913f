"""Trained runs, and the steps that they must refuse."""

import copy
import functools
from typing import Any

import pytest
import torch
from tiny_runs import MEMORIES, OPTIMIZERS, Plan, Run, batches, differences
from torch import Tensor

import sketchoptim as so


def trained(kind: str = "Adam", **options: Any) -> Run:
    """A run of two steps, the caller's own."""
    memory = "paper-mv" if kind == "SGD" else "lean-0.1"
    return Run.start(Plan(OPTIMIZERS[kind], memory, options)).train(batches(2))


@functools.cache
def trained_with(memory: str) -> Run:
    """A trained run, the same one for every call: refused steps leave it as it is."""
    return Run.start(Plan(so.Adam, MEMORIES[memory])).train(batches(2))


def refuse_step(run: Run, error: type[Exception], pattern: str) -> None:
    """The step raises; parameters, gradients and state are what they were."""
    before = run.bits()
    gradients = [copy.deepcopy(parameter.grad) for parameter in run.model.parameters()]
    with pytest.raises(error, match=pattern):
        run.optimizer.step()
    assert differences(run.bits(), before) == []
    for parameter, gradient in zip(run.model.parameters(), gradients, strict=True):
        if gradient is not None and gradient.layout in (torch.strided, torch.sparse_coo):
            assert torch.equal(dense(parameter.grad).nan_to_num(7), dense(gradient).nan_to_num(7))


def dense(gradient: Tensor) -> Tensor:
    """The values of a gradient, also where its ids are out of range."""
    return gradient._values() if gradient.is_sparse else gradient
