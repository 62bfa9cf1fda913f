"""A program: a step of a compressed table and of exact parameters in too little memory."""

import resource
from pathlib import Path

import torch
from gradients import sparse

import sketchoptim as so

PAGE = resource.getpagesize()


def address_space() -> int:
    """The bytes that the process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


def main() -> None:
    torch.set_num_threads(1)
    table, dense = (
        torch.nn.Parameter(torch.ones(100, 8)),
        torch.nn.Parameter(torch.ones(4000, 4000)),
    )
    optimizer = so.Adam([{"params": [table]}, {"params": [dense], "memory": "exact"}], lr=0.1)
    table.grad = sparse(torch.tensor([3, 5]), torch.ones(2, 8), table.shape)
    dense.grad = torch.ones_like(dense)
    optimizer.step()
    state = [optimizer.state[it][key] for it in (table, dense) for key in ("step",)]
    before = [
        it.clone() for it in (table, dense[:2], optimizer.state[dense]["first_values"][:2], *state)
    ]
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + dense.nbytes * 3 // 2, unlimited[1]))
    try:
        optimizer.step()
        outcome = "taken"
    except (MemoryError, RuntimeError):
        outcome = "refused"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
    for name in (outcome, "taken"):
        now = (table, dense[:2], optimizer.state[dense]["first_values"][:2], *state)
        moved = [not torch.equal(old, new) for old, new in zip(before, now, strict=True)]
        found = "all" if all(moved) else "some" if any(moved) else "nothing"
        print(f"{name}: {found} moved")
        if name == "refused":
            optimizer.step()
        else:
            break


if __name__ == "__main__":
    main()
