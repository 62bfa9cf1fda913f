"""A sparse table under DistributedDataParallel: two processes, one model."""

import subprocess
import sys

import pytest
import torch
import torch.distributed

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import sketchoptim as so

torch.set_num_threads(1)
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(300, 8, sparse=True), nn.Linear(8, 3))
replica = nn.parallel.DistributedDataParallel(model)
optimizer = so.Adam(model.parameters(), lr=0.05)
batches = torch.Generator().manual_seed(rank)
for step in range(20):
    ids = torch.randint(300, (32,), generator=batches)
    optimizer.zero_grad()
    nn.functional.cross_entropy(replica(ids), ids % 3).backward()
    optimizer.step()
torch.save([model.state_dict(), optimizer.state_dict()["state"]], f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """Weights and state of both processes, after steps on different batches."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    folder = tmp_path_factory.mktemp("replicas")
    command = [sys.executable, "-c", PROGRAM]
    processes = [subprocess.Popen([*command, str(rank), str(folder)]) for rank in range(2)]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_replicas_have_the_same_weights(replicas):
    (one, _), (other, _) = replicas
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_replicas_have_the_same_sketches(replicas):
    (_, one), (_, other) = replicas
    assert one[0]["second_counters"].count_nonzero() > 0
    for number, state in one.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other[number][key]), (number, key)
