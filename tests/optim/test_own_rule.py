"""An optimizer of one's own, whose rule is a function: no kernel knows it, and torch has none."""

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from collision_free import collision_free_seed
from gradients import STREAMS, start
from saved_runs import reloaded
from tiny_runs import bits, differences
from torch import Tensor, nn

import sketchoptim as so
from sketchoptim import _rows, ops
from sketchoptim.optim import Average, Optimizer, Rule

SHAPE, STEPS, WIDTH = (30, 4), 12, 1024


class SignMomentum(Optimizer):
    """``m <- beta m + (1 - beta) g;  p <- p - lr sign(m)``, or sign(g) where m is dropped."""

    moment_names = ("first",)

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        beta: float = 0.9,
        weight_decay: float = 0.0,
        *,
        memory: str | so.Memory = "exact",
        maximize: bool = False,
        nonfinite: str = "raise",
        reads_before: bool = False,
    ) -> None:
        self.seen: list[Tensor | None] = []  # the moments that the rule was given
        super().__init__(
            params,
            lr=lr,
            beta=beta,
            weight_decay=weight_decay,
            memory=memory,
            maximize=maximize,
            nonfinite=nonfinite,
            reads_before=reads_before,
        )

    def rule(self, group: dict[str, Any], step: int, *, memory: so.Memory, is_sparse: bool) -> Rule:
        def update(rows: Tensor, gradient: Tensor, mean: Tensor | None, _: Tensor | None) -> Tensor:
            self.seen.append(None if mean is None else mean.clone())
            return rows - group["lr"] * (gradient if mean is None else mean).sign()

        return Rule(
            update,
            first=None if memory.first is None else Average(group["beta"], 1 - group["beta"]),
            maximize=group["maximize"],
            weight_decay=group["weight_decay"],
            reads_before=group["reads_before"],
        )


def by_hand(gradients: list[Tensor], *, has_moment: bool, maximize: bool) -> Tensor:
    """The same in plain torch: only rows that a gradient names have their moment moved."""
    weights, mean = start(SHAPE), torch.zeros(SHAPE)
    for gradient in gradients:
        rows = gradient._indices()[0].unique() if gradient.is_sparse else torch.arange(SHAPE[0])
        dense = gradient.to_dense()[rows] * (-1 if maximize else 1)
        mean[rows] = 0.9 * mean[rows] + 0.1 * dense
        weights[rows] -= 0.1 * (mean[rows] if has_moment else dense).sign()
    return weights


def built(memory: str | so.Memory, **options: Any) -> tuple[nn.Parameter, SignMomentum]:
    parameter = nn.Parameter(start(SHAPE))
    # A group that names its memory compresses parameters with dense gradients too.
    return parameter, SignMomentum([{"params": [parameter], "memory": memory}], **options)


def step_on(parameter: nn.Parameter, optimizer: Optimizer, gradients: list[Tensor]) -> None:
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()


def without_collisions() -> so.Sketched:
    seed = collision_free_seed(SHAPE[0], WIDTH)
    return so.Sketched(width=WIDTH, granularity="element", decay="paper", seed=seed)


MEMORIES = {
    "exact": so.Memory(first=so.Exact()),
    "sketched": so.Memory(first=without_collisions()),
    "dropped": so.Memory(first=None, second=so.Exact()),
}
every_memory = pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)


@every_memory
@pytest.mark.parametrize("maximize", [False, True], ids=["descending", "climbing"])
@pytest.mark.parametrize("kind", STREAMS)
def test_a_rule_that_is_a_function_does_what_it_says(memory, kind, maximize):
    gradients = list(STREAMS[kind](SHAPE, STEPS))
    parameter, optimizer = built(memory, maximize=maximize)
    step_on(parameter, optimizer, gradients)
    expected = by_hand(gradients, has_moment=memory.first is not None, maximize=maximize)
    torch.testing.assert_close(parameter.detach(), expected)
    assert optimizer.state[parameter]["step"] == STEPS


class FunctionalAdam(so.Adam):
    """Adam whose rule is handed over as a function."""

    torch_step_ = None

    def rule(self, *args: Any, **kwargs: Any) -> Rule:
        fused = super().rule(*args, **kwargs)
        return Rule(fused.update, fused.first, fused.second, fused.maximize, fused.weight_decay)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("memory", ["lean-0.1", "paper-mv", "rank-one", "8-bit"])
def test_a_function_with_two_moments_has_the_bits_of_the_fused_rule(memory, kind):
    weights = []
    for optimizer_of in (so.Adam, FunctionalAdam):
        parameter = nn.Parameter(start(SHAPE))
        group = {"params": [parameter], "memory": memory}
        with ops.reference_only():
            optimizer = optimizer_of([group], lr=0.1, weight_decay=0.1, maximize=True)
            step_on(parameter, optimizer, list(STREAMS[kind](SHAPE, STEPS)))
        weights.append(parameter.detach())
    assert torch.equal(*weights)


# -- moments as they were --------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [MEMORIES["exact"], MEMORIES["sketched"]], ids=str)
@pytest.mark.parametrize("reads_before", [False, True])
def test_a_rule_reads_the_moment_after_the_step_or_as_it_was_before(memory, reads_before):
    parameter, optimizer = built(memory, reads_before=reads_before, beta=0.5)
    step_on(parameter, optimizer, [torch.full(SHAPE, size) for size in (1.0, 2.0, 4.0)])
    after = [0.5, 1.25, 2.625]
    expected = [0.0, *after[:-1]] if reads_before else after
    for mean, value in zip(optimizer.seen, expected, strict=True):
        torch.testing.assert_close(mean, torch.full(SHAPE, value))


@pytest.mark.parametrize("decay", ["linear", "paper", "bucket"])
def test_no_row_sees_what_a_row_before_it_left_in_their_bucket(decay):
    """Where moments are read as they were; here all rows share one bucket, and come in turn."""
    crowded = so.Sketched(width=1, granularity="element", decay=decay)
    parameter, optimizer = built(so.Memory(first=crowded), reads_before=True, beta=0.99)
    with mock.patch.object(_rows, "CHUNK_ELEMENTS", 2 * SHAPE[1]):
        step_on(parameter, optimizer, [torch.ones(SHAPE)])
    assert len(optimizer.seen) == SHAPE[0] / 2
    assert not any(mean.any() for mean in optimizer.seen)
    assert optimizer.state[parameter]["first_counters"].any()


@pytest.mark.parametrize("reads_before", [False, True])
def test_moments_of_half_precision_parameters_come_in_float32(reads_before):
    parameter = nn.Parameter(start(SHAPE).bfloat16())
    optimizer = SignMomentum([parameter], reads_before=reads_before)
    step_on(parameter, optimizer, [torch.ones_like(parameter)])
    assert [mean.dtype for mean in optimizer.seen] == [torch.float32]


def test_weight_decay_of_a_rule_that_reads_before_is_refused_and_nothing_changes():
    parameter, optimizer = built("exact", reads_before=True, weight_decay=0.1)
    parameter.grad = torch.ones(SHAPE)
    with pytest.raises(ValueError, match=r"weight_decay .* reads_before=True must be 0, got 0.1; "):
        optimizer.step()
    assert torch.equal(parameter.detach(), start(SHAPE))
    assert not optimizer.state


# -- like any other optimizer ----------------------------------------------------------------------


@every_memory
def test_it_is_warned_of_once_a_parameter_that_the_reference_steps_it(memory):
    parameters = [nn.Parameter(start(SHAPE)) for _ in range(2)]
    optimizer = SignMomentum([{"params": parameters, "memory": memory}])
    message = (
        r"^the parameter of shape \[30, 4\] is stepped by the reference kernels, which are many "
        "times slower: the CPU kernels support only FusedRule"
    )
    for parameter in parameters:
        parameter.grad = torch.ones(SHAPE)
    with pytest.warns(UserWarning, match=message) as caught:
        optimizer.step()
    assert len(caught) == 2
    with warnings.catch_warnings(action="error"):
        optimizer.step()


@every_memory
@pytest.mark.parametrize("kind", STREAMS)
def test_a_run_that_was_saved_and_loaded_continues_bit_for_bit(memory, kind):
    gradients = list(STREAMS[kind](SHAPE, STEPS))
    parameter, optimizer = built(memory)
    step_on(parameter, optimizer, gradients[:5])
    resumed, loaded = built(memory)
    with torch.no_grad():
        resumed.copy_(parameter)
    loaded.load_state_dict(*reloaded(optimizer.state_dict()))
    step_on(parameter, optimizer, gradients[5:])
    step_on(resumed, loaded, gradients[5:])
    found = [bits(optimizer, [("p", parameter)]), bits(loaded, [("p", resumed)])]
    assert differences(*found) == []


def test_it_has_no_counterpart_in_torch():
    _, optimizer = built("exact")
    with pytest.raises(TypeError, match=r"SignMomentum has no counterpart in torch.optim"):
        so.to_torch(optimizer)
