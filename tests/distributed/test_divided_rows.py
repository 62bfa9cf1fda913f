"""Tables whose rows processes divide among them: the same bits as in one process."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import sketchoptim as so
from sketchoptim.ops import reference_only

DIM = 256
# Divided evenly by 4, unevenly, and with nothing left for the last process.
ROWS = {"even": 1024, "uneven": 1021, "empty": 9}
SAME_BITS = ["lean-0.1", "row-wise", "exact", "8-bit"]
COLUMNS = [
    so.Memory(second=so.Sketched(conservative=True, columns=True)),
    so.Memory(second=so.RowWise(columns=True)),
]
LINEAR = so.Memory(
    first=so.Sketched(ratio=0.5, granularity="element"),
    second=so.Sketched(ratio=0.5, granularity="element"),
)
REFERENCE = ".*is stepped by the reference kernels"


class Twins:
    """One table here, and the same one divided among the processes."""

    def __init__(
        self,
        rows: int,
        memory: str | so.Memory,
        kind: str = "Adam",
        dtype: torch.dtype = torch.float32,
        **options,
    ):
        self.generator = torch.Generator().manual_seed(0)
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        weights = torch.randn(rows, DIM, generator=self.generator).to(dtype)
        self.whole = nn.Parameter(weights.clone())
        self.divided = nn.Parameter(self.divide(weights))
        self.one, self.many = (
            getattr(so, kind)([{"params": [("table", it)], "memory": memory}], lr=0.01, **options)
            for it in (self.whole, self.divided)
        )

    def divide(self, tensor: Tensor) -> DTensor:
        return distribute_tensor(tensor, self.mesh, [Shard(0)])

    def step(self, gradient: Tensor | None = None) -> None:
        if gradient is None:
            gradient = torch.randn(self.whole.shape, generator=self.generator)
        gradient = gradient.to(self.whole.dtype)
        self.whole.grad, self.divided.grad = gradient, self.divide(gradient)
        self.one.step()
        self.many.step()

    def differences(self) -> list[tuple[str, Tensor, Tensor]]:
        """What differs in weights and state."""
        pairs = {"weights": (self.whole.detach(), self.divided.detach())}
        states = [it.state_dict()["state"][0] for it in (self.one, self.many)]
        assert states[0].keys() == states[1].keys()
        for key, value in states[0].items():
            if key == "digest":  # without checksums of what processes divide
                continue
            pairs[key] = (torch.as_tensor(value), torch.as_tensor(states[1][key]))
        found = []
        for key, (one, many) in pairs.items():
            many = many.full_tensor() if isinstance(many, DTensor) else many
            if not torch.equal(one, many):
                found.append((key, one, many))
        return found


@on_ranks(1, 2, 4)
def test_divided_tables_have_the_bits_of_one_process():
    for rows in ROWS.values():
        for memory in SAME_BITS:
            twins = Twins(rows, memory)
            for _ in range(50 if memory != "8-bit" else 10):
                twins.step()
            assert twins.differences() == [], (rows, memory)


@on_ranks(1, 2, 4)
def test_factors_of_columns_have_the_bits_of_one_process():
    """The processes sum integers, in one more collective for all tables together."""
    for backend in (nullcontext, reference_only):
        with backend():
            for rows in ROWS.values():
                for memory in COLUMNS:
                    for kind, dtype in (("Adam", torch.float32), ("Adagrad", torch.bfloat16)):
                        twins = Twins(rows, memory, kind, dtype)
                        for _ in range(5):
                            twins.step()
                        assert twins.differences() == [], (backend, rows, memory, kind)


@on_ranks(2)
def test_every_optimizer_steps_divided_tables():
    kinds = {"AdamW": {}, "RMSprop": {}, "Adagrad": {}, "SGD": {"momentum": 0.9}}
    for kind, options in kinds.items():
        twins = Twins(ROWS["uneven"], "exact" if kind == "SGD" else "lean-0.1", kind, **options)
        for _ in range(5):
            twins.step()
        assert twins.differences() == [], kind


@on_ranks(4)
def test_half_precision_tables_are_rounded_as_in_one_process():
    for dtype in (torch.bfloat16, torch.float16):
        twins = Twins(ROWS["uneven"], "lean-0.1", dtype=dtype)
        for _ in range(5):
            twins.step()
        assert twins.differences() == [], dtype


@on_ranks(2, 4, ignore=[REFERENCE])
def test_sums_over_processes_differ_by_rounding_alone():
    for rows in ROWS.values():
        for memory in (LINEAR, "rank-one"):
            twins = Twins(rows, memory)
            for _ in range(5):
                twins.step()
            for key, one, many in twins.differences():
                torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-6, msg=key)


@on_ranks(4)
def test_a_step_is_two_collectives_for_all_tables_together(folder):
    mesh = init_device_mesh("cpu", (4,))
    tables = [nn.Parameter(distribute_tensor(torch.ones(64, 8), mesh, [Shard(0)])) for _ in "abc"]
    optimizer = so.Adam([{"params": tables, "memory": "lean-0.1"}])
    for _ in range(2):
        for table in tables:
            table.grad = distribute_tensor(torch.ones(64, 8), mesh, [Shard(0)])
        with torch.profiler.profile() as profile:
            optimizer.step()
    counts = {it.key: it.count for it in profile.key_averages() if it.key.startswith("gloo:")}
    assert counts == {"gloo:all_reduce": 2}


@on_ranks(4)
def test_folding_and_cleaning_keep_the_sketches_of_all_processes_one():
    second = so.Sketched(width=64, conservative=True, fold_at=(2,), clean_every=3, clean_by=0.5)
    twins = Twins(ROWS["uneven"], so.Memory(second=second))
    for _ in range(4):
        twins.step()
    assert twins.differences() == []


# -- one process has something wrong -----------------------------------------------------------


@on_ranks(2, 4)
def test_a_gradient_that_is_not_finite_in_one_process_is_refused_in_all():
    twins = Twins(ROWS["even"], "lean-0.1")
    twins.step()
    gradient = torch.ones(twins.whole.shape)
    gradient[-1, 3] = math.nan  # a row of the last process
    twins.divided.grad = twins.divide(gradient)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    message = "must be finite" if is_last else "another process refused this step"
    with pytest.raises(ValueError if is_last else RuntimeError, match=message):
        twins.many.step()
    assert twins.differences() == []
    twins.step()
    assert twins.differences() == []


@on_ranks(2, 4)
def test_a_gradient_that_is_not_finite_in_one_process_is_skipped_in_all():
    twins = Twins(ROWS["even"], "lean-0.1", nonfinite="skip")
    gradient = torch.ones(twins.whole.shape)
    gradient[0, 0] = math.inf
    for it in (None, gradient, None):
        twins.step(it)
    assert twins.many.state[twins.divided]["skipped"] == 1
    assert twins.differences() == []


@on_ranks(2)
def test_a_gradient_that_only_some_processes_have_is_refused_in_all():
    twins = Twins(ROWS["even"], "lean-0.1")
    twins.step()
    if dist.get_rank() == 1:
        twins.divided.grad = None
    with pytest.raises(ValueError, match=r"\[1024, 256\] must have a gradient in all processes"):
        twins.many.step()
    assert twins.differences() == []


@on_ranks(2)
def test_a_process_that_is_gone_before_a_step_changes_nothing_in_the_others():
    twins = Twins(ROWS["even"], "lean")
    twins.step()
    before = twins.many.state_dict()["state"][0]["digest"], twins.divided.to_local().clone()
    if dist.get_rank() == 1:
        dist.destroy_process_group()  # as when the process ends
        return
    with pytest.raises(RuntimeError):  # the words are those of gloo or NCCL
        twins.many.step()
    after = twins.many.state_dict()["state"][0]["digest"], twins.divided.to_local()
    assert all(torch.equal(*it) for it in zip(before, after, strict=True))


@on_ranks(2)
def test_replicated_tables_are_stepped_by_each_process_for_itself():
    mesh = init_device_mesh("cpu", (2,))
    weights = torch.ones(64, 8)
    plain, replicated = (
        nn.Parameter(weights.clone()),
        distribute_tensor(weights, mesh, [Replicate()]),
    )
    replicated = nn.Parameter(replicated)
    for parameter in (plain, replicated):
        parameter.grad = torch.full((64, 8), 0.5)
        if parameter is replicated:
            parameter.grad = distribute_tensor(parameter.grad, mesh, [Replicate()])
        so.Adam([{"params": [parameter], "memory": "lean-0.1"}]).step()
    assert torch.equal(replicated.to_local(), plain)
