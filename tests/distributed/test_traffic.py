"""What ranks send in a step is what a plan says."""

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import sketchoptim as so

SHAPES = [("one", (5_000, 8)), ("two", (4_097, 4))]


@on_ranks(2)
def test_a_step_reduces_and_keeps_the_bytes_of_the_plan():
    mesh = init_device_mesh("cpu", (2,))
    parameters = [
        (name, nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)])))
        for name, shape in SHAPES
    ]
    optimizer = so.Adam([{"params": parameters, "memory": "lean"}])
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # the first one compares the processes too
    reduced = []
    all_reduce = dist.all_reduce

    def counted(tensor, *arguments, **options):
        reduced.append(tensor.nbytes)
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = counted
    try:
        optimizer.step()
    finally:
        dist.all_reduce = all_reduce
    plan = so.plan(SHAPES, 1.0, ranks=2)
    flags = 4 * (1 + 3 * len(SHAPES))
    assert sum(reduced) * 2 * (2 - 1) / 2 == plan.sent_bytes + flags
    report = so.memory_report(optimizer)
    assert report.state_bytes == plan.state_bytes
    if dist.get_rank() == 0:  # which has the most rows
        assert report.exact_bytes == plan.exact_bytes
