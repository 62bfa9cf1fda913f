"""torch.ops.sketchoptim.step_, the step as one operator in a compiled graph."""

import json

import pytest
import torch
from backends import LEVELS, needs_native, stepping_by
from torch import Tensor

import sketchoptim as so
from sketchoptim import moments
from sketchoptim.moments import Average, Table
from sketchoptim.ops import Rule, rule_to_tensor
from sketchoptim.ops._library import rule_from_tensor
from sketchoptim.storage import PRESETS, Storage

ROWS, DIM = 60, 20


def adam_rule(step: int, *, has_first: bool) -> Rule:
    optimizer = so.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    memory = PRESETS["exact"] if has_first else PRESETS["lean"]
    return optimizer._rule(optimizer.param_groups[0], step, memory=memory, is_sparse=True)


@pytest.mark.parametrize("preset", ["lean", "exact", "paper-mv"])
def test_a_compiled_graph_with_the_operator_does_what_the_optimizer_does(preset: str) -> None:
    generator = torch.Generator().manual_seed(0)
    memory = PRESETS[preset]
    parameter = torch.randn(ROWS, DIM, generator=generator)
    twin = torch.nn.Parameter(parameter.clone())
    optimizer = so.Adam([twin], lr=0.1, memory=memory)
    table = Table(parameter.shape, parameter.dtype, parameter.device, 0)
    state = {
        name: [] if storage is None else list(moments.create(storage, table).values())
        for name, storage in (("first", memory.first), ("second", memory.second))
    }
    text = json.dumps(memory.to_dict())

    @torch.compile(fullgraph=True, backend="aot_eager")
    def train_step(ids: Tensor, values: Tensor, rule: Tensor) -> Tensor:
        doubled = values * 2
        torch.ops.sketchoptim.step_(
            parameter, ids, doubled, state["first"], state["second"], rule, text
        )
        return parameter.sum()

    for step in range(1, 5):
        ids = torch.randint(ROWS, (30,), generator=generator)
        values = torch.randn(30, DIM, generator=generator)
        twin.grad = torch.sparse_coo_tensor(
            ids.unsqueeze(0), values * 2, twin.shape, check_invariants=True
        )
        optimizer.step()
        train_step(ids, values, rule_to_tensor(adam_rule(step, has_first=bool(memory.first))))
        assert torch.equal(parameter, twin.detach())


@pytest.mark.parametrize("storage", [so.Sketched(), so.Sketched(dtype=torch.bfloat16), so.Exact()])
def test_the_operator_takes_moments_that_start_from_a_value(storage: Storage) -> None:
    generator = torch.Generator().manual_seed(0)
    memory = so.Memory(second=storage)
    parameter = torch.randn(ROWS, DIM, generator=generator)
    twin = torch.nn.Parameter(parameter.clone())
    optimizer = so.Adagrad([twin], lr=0.1, memory=memory, initial_accumulator_value=0.5)
    table = Table(parameter.shape, parameter.dtype, parameter.device, 0)
    second = list(moments.create(storage, table, fill=0.5).values())
    rule = rule_to_tensor(Rule(step_size=0.1, second=Average(1.0, 1.0), eps=1e-10))
    for _ in range(3):
        ids = torch.randint(ROWS, (30,), generator=generator)
        values = torch.randn(30, DIM, generator=generator)
        twin.grad = torch.sparse_coo_tensor(
            ids.unsqueeze(0), values, twin.shape, check_invariants=True
        )
        optimizer.step()
        torch.ops.sketchoptim.step_(
            parameter, ids, values, [], second, rule, json.dumps(memory.to_dict())
        )
        assert torch.equal(parameter, twin.detach())


def test_the_operator_refuses_moments_of_which_a_part_is_missing() -> None:
    memory = PRESETS["lean"]
    parameter = torch.zeros(ROWS, DIM)
    assert memory.second is not None
    table = Table(parameter.shape, parameter.dtype, parameter.device, 0)
    tensors = list(moments.create(memory.second, table).values())
    with pytest.raises(ValueError, match=r"second must be the tensors \['table', .* got 2 tensors"):
        torch.ops.sketchoptim.step_(
            parameter,
            torch.tensor([3]),
            torch.ones(1, DIM),
            [],
            tensors[:2],
            rule_to_tensor(adam_rule(1, has_first=False)),
            json.dumps(memory.to_dict()),
        )


def test_the_operator_lets_a_nan_through_to_exact_moments_as_the_optimizers_do() -> None:
    parameter, second = torch.zeros(ROWS, DIM), torch.zeros(ROWS, DIM)
    torch.ops.sketchoptim.step_(
        parameter,
        torch.tensor([3]),
        torch.full((1, DIM), float("nan")),
        [],
        [second],
        rule_to_tensor(adam_rule(1, has_first=False)),
        json.dumps(so.Memory(second=so.Exact()).to_dict()),
    )
    assert parameter.isnan().any(1).nonzero().flatten().tolist() == [3]


def test_the_operator_refuses_values_that_are_not_finite() -> None:
    memory = PRESETS["lean"]
    parameter = torch.zeros(ROWS, DIM)
    table = Table(parameter.shape, parameter.dtype, parameter.device, 0)
    assert memory.second is not None
    tensors = list(moments.create(memory.second, table).values())
    with pytest.raises(ValueError, match="finite"):
        torch.ops.sketchoptim.step_(
            parameter,
            torch.tensor([3]),
            torch.full((1, DIM), float("nan")),
            [],
            tensors,
            rule_to_tensor(adam_rule(1, has_first=False)),
            json.dumps(memory.to_dict()),
        )
    assert not parameter.any()
    assert not tensors[0].any()


@pytest.mark.parametrize(
    "rule",
    [
        Rule(step_size=0.1),
        Rule(step_size=0.1, first=Average(0.9, 1.0), nesterov=0.9, maximize=True),
        Rule(step_size=0.1, second=Average(0.99, 0.01), eps=1e-8, clip=1.0, second_root=0.5),
        Rule(step_size=1e-3, weight_decay=0.1, shrink=0.9, is_ratio=True),
    ],
)
def test_a_rule_survives_the_way_through_a_vector(rule: Rule) -> None:
    assert rule_from_tensor(rule_to_tensor(rule)) == rule


@needs_native
def test_looking_ahead_with_a_momentum_of_zero_follows_the_gradient_on_every_backend() -> None:
    memory = so.Memory(first=so.Exact())
    rule = rule_to_tensor(Rule(step_size=1.0, first=Average(0.5, 0.5), nesterov=0.0))
    outcomes = []
    for level in (None, *LEVELS):
        parameter, momentum = torch.zeros(ROWS, DIM), torch.ones(ROWS, DIM)
        with stepping_by(level):
            torch.ops.sketchoptim.step_(
                parameter,
                torch.tensor([3]),
                torch.full((1, DIM), 2.0),
                [momentum],
                [],
                rule,
                json.dumps(memory.to_dict()),
            )
        outcomes.append(parameter[3])
    for outcome in outcomes:
        assert torch.equal(outcome, torch.full((DIM,), -2.0))
