"""Reports name what a deferred gradient takes, and compute no rows that stay."""

import torch
from torch import nn

import sketchoptim as so

WORDS, DIM = 2000, 8


def trained() -> tuple[nn.Module, so.AdamW]:
    """A tied model after a backward pass, with its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, DIM), nn.Linear(DIM, WORDS, bias=False))
    model[1].weight = model[0].weight
    so.defer_gradients(model)
    optimizer = so.AdamW(so.param_groups(model))
    words = torch.arange(20)
    nn.functional.cross_entropy(model(words), words + 1).backward()
    return model, optimizer


def test_the_memory_report_names_the_bytes_of_deferred_gradients():
    model, optimizer = trained()
    (found,) = so.memory_report(optimizer).parameters
    taken = model[0].weight.grad.nbytes
    assert (found.is_deferred, found.gradient_bytes) == (True, taken)
    assert 0 < taken < model[0].weight.nbytes / 10
    line = f"deferred gradients take {taken:,} bytes instead of {WORDS * DIM * 4:,}: 0.weight"
    assert line in str(so.memory_report(optimizer))
    so.materialize_gradients(model)
    (found,) = so.memory_report(optimizer).parameters
    assert (found.is_deferred, found.gradient_bytes) == (False, model[0].weight.nbytes)


def test_a_diagnosis_reads_a_deferred_gradient_in_blocks():
    model, optimizer = trained()
    gradient = model[0].weight.grad
    (found,) = so.diagnose(optimizer).findings
    assert found.kept == f"{gradient.nbytes:,} bytes"
    assert not gradient.exists
    so.materialize_gradients(model)
    (plain,) = so.diagnose(optimizer).findings
    assert found.power_law.top_rows == plain.power_law.top_rows


def test_a_diagnosis_after_the_step_leaves_out_a_gradient_that_was_used():
    _, optimizer = trained()
    optimizer.step()
    assert [found.quantity for found in so.diagnose(optimizer).findings] == ["second"]
