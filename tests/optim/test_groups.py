"""Contract 9, what works with torch.optim works here: groups and their options."""

import pytest
import torch
from tiny_runs import PRESET_PLANS, Run, TinyModel, batches, differences
from torch import Tensor, nn

import sketchoptim as so


def test_options_of_a_group_win_over_the_defaults():
    run = Run.start(PRESET_PLANS["paper-mv"])
    run.optimizer.param_groups[0]["lr"] = 0.0
    before = run.bits()
    changed = differences(run.train(batches(2)).bits(), before)
    assert "table.weight" not in changed
    assert "late.weight" not in changed
    assert "head.weight" in changed


def test_named_parameters_are_accepted_with_and_without_groups():
    model = TinyModel()
    names = [name for name, _ in model.named_parameters()]
    assert so.Adam(model.named_parameters()).param_groups[0]["param_names"] == names
    tables = [(name, p) for name, p in model.named_parameters() if "head" not in name]
    heads = [(name, p) for name, p in model.named_parameters() if "head" in name]
    optimizer = so.Adam([{"params": tables}, {"params": heads, "memory": "row-wise"}])
    assert optimizer.param_groups[1]["param_names"] == ["head.weight", "head.bias"]
    Run(model, optimizer).train(batches(2))


def test_a_group_added_after_training_started_trains():
    run = Run.start(PRESET_PLANS["lean-0.1"]).train(batches(2))
    torch.manual_seed(5)
    extra = nn.Embedding(20, 4, sparse=True)
    run.optimizer.add_param_group({"params": extra.parameters(), "lr": 0.5})
    before = run.bits()
    run.optimizer.zero_grad()
    extra(torch.tensor([3, 4])).square().sum().backward()
    run.optimizer.step()
    assert differences(run.bits(), before) == []
    assert run.optimizer.state[extra.weight]["step"] == 1
    run.train(batches(1))
    assert run.optimizer.state[run.model.table.weight]["step"] == 3


def test_an_added_group_inherits_the_default_memory_and_keeps_dense_parameters_exact():
    run = Run.start(PRESET_PLANS["lean-0.1"])
    layer = nn.Linear(3, 2)
    run.optimizer.add_param_group({"params": layer.parameters()})
    layer(torch.ones(1, 3)).sum().backward()
    run.optimizer.step()
    assert run.optimizer.param_groups[-1]["memory"] == so.storage.PRESETS["lean-0.1"]
    assert run.optimizer.state[layer.weight]["first_values"].shape == layer.weight.shape


def test_a_table_that_a_dense_gradient_settled_as_exact_is_warned_of_once():
    table = nn.Embedding(20, 4, sparse=True)
    optimizer = so.Adam(table.parameters())
    table.weight.grad = torch.zeros(20, 4)  # as torch.distributed.checkpoint makes state
    optimizer.step()
    table.weight.grad = None
    table(torch.tensor([3, 4])).sum().backward()
    with pytest.warns(UserWarning, match="first gradient was dense. Put it into a group"):
        optimizer.step()
    optimizer.step()  # where a second warning would be an error


def test_a_table_without_moments_is_not_warned_of():
    table = nn.Embedding(20, 4, sparse=True)
    optimizer = so.SGD(table.parameters(), lr=0.1, momentum=0.0)
    table.weight.grad = torch.zeros(20, 4)
    optimizer.step()
    table.weight.grad = None
    table(torch.tensor([3, 4])).sum().backward()
    optimizer.step()  # where a warning would be an error


def stepped(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """The parameter after four steps on the same dense gradients."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(4):
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return parameter.detach()


def test_a_group_that_drops_the_momentum_drops_it_for_dense_gradients_too():
    ours, theirs = nn.Parameter(torch.ones(6, 3)), nn.Parameter(torch.ones(6, 3))
    dropped = so.SGD([{"params": [ours], "memory": "lean-0.1"}], lr=0.1, momentum=0.9)
    plain = torch.optim.SGD([theirs], lr=0.1, momentum=0.0)
    torch.testing.assert_close(stepped(dropped, ours), stepped(plain, theirs))
    assert so.memory_report(dropped).state_bytes == 0


def test_a_group_that_drops_the_first_moment_drops_it_for_dense_gradients_too():
    ours, theirs = nn.Parameter(torch.ones(6, 3)), nn.Parameter(torch.ones(6, 3))
    memory = so.Memory(first=None, second=so.Exact())
    dropped = so.Adam([{"params": [ours], "memory": memory}], lr=0.1)
    plain = torch.optim.Adam([theirs], lr=0.1, betas=(0.0, 0.999))
    torch.testing.assert_close(stepped(dropped, ours), stepped(plain, theirs))


def test_a_clip_bounds_the_steps_of_exact_dense_parameters():
    parameter = nn.Parameter(torch.zeros(6, 3))
    memory = so.Memory(first=so.Exact(), second=so.Exact(), clip=0.25)
    optimizer = so.Adam([{"params": [parameter], "memory": memory}], lr=0.1)
    parameter.grad = torch.ones(6, 3)  # a first step is one learning rate long
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((6, 3), -0.025))


def test_tables_of_one_optimizer_have_hashes_of_their_own():
    run = Run.start(PRESET_PLANS["lean-0.1"]).train(batches(1))
    state = run.optimizer.state
    words = [state[t.weight]["second_words"] for t in (run.model.table, run.model.late)]
    assert not torch.equal(*words)


def test_several_optimizers_share_a_model():
    run = Run.start(PRESET_PLANS["lean-0.1"])
    tables = so.Adagrad([run.model.table.weight], lr=0.1)
    rest = torch.optim.SGD(
        [p for p in run.model.parameters() if p is not run.model.table.weight], lr=0.1
    )
    (ids,) = batches(1)
    found = []
    for _ in range(12):
        found.append(run.backward(ids).item())
        tables.step()
        rest.step()
    assert found[-1] < 0.7 * found[0]
    assert set(tables.state) == {run.model.table.weight}


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("memory", ["exact", "paper-mv"])
@pytest.mark.parametrize("dampening", [0.0, 0.5])
@pytest.mark.parametrize("is_reloaded", [False, True], ids=["", "reloaded"])
def test_momentum_may_be_switched_on_and_off(memory, is_sparse, dampening, is_reloaded):
    late, never = nn.Parameter(torch.ones(40, 4)), nn.Parameter(torch.ones(40, 4))
    options = {"lr": 0.1, "momentum": 0.0, "dampening": dampening}
    ours = so.SGD([late], memory=memory, **options)
    theirs = torch.optim.SGD([never], **options)
    for momentum in (0.0, 0.0, 0.9, 0.9, 0.0, 0.9):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["momentum"] = momentum
        if is_reloaded:
            saved = ours.state_dict()
            ours = so.SGD([late], memory=memory, **options)
            ours.load_state_dict(saved)
        for parameter, optimizer in ((late, ours), (never, theirs)):
            gradient = torch.zeros(40, 4)
            gradient[3] = 1.0
            parameter.grad = gradient
            if is_sparse and optimizer is ours:
                parameter.grad = gradient.to_sparse(1)
            optimizer.step()
    torch.testing.assert_close(late, never)
