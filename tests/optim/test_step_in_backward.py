"""Optimizers that step inside the backward pass, one for each parameter."""

import torch
from tiny_runs import TinyModel, batches
from torch import Tensor

import sketchoptim as so


def step_in_backward(model: TinyModel, *, is_named: bool) -> list[so.Adam]:
    optimizers = []
    for name, parameter in model.named_parameters():
        params = [(name, parameter)] if is_named else [parameter]
        optimizer = so.Adam(params, lr=0.1, memory="lean-0.1")

        def step(_: Tensor, optimizer: so.Adam = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
        optimizers.append(optimizer)
    return optimizers


def test_named_parameters_get_the_bits_of_one_optimizer_over_all():
    model, twin = TinyModel(), TinyModel()
    twin.load_state_dict(model.state_dict())
    step_in_backward(model, is_named=True)
    whole = so.Adam(twin.named_parameters(), lr=0.1, memory="lean-0.1")
    for batch in batches(5):
        model.loss(batch).backward()
        twin.loss(batch).backward()
        whole.step()
        whole.zero_grad()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter, other)


def test_tables_hash_differently_where_they_are_named():
    words = {}
    for is_named in (True, False):
        model = TinyModel()
        table, late, *_ = step_in_backward(model, is_named=is_named)
        model.loss(batches(1)[0]).backward()
        words[is_named] = [
            optimizer.state[parameter]["second_words"]
            for optimizer, parameter in ((table, model.table.weight), (late, model.late.weight))
        ]
    assert not torch.equal(*words[True])
    assert torch.equal(*words[False])
