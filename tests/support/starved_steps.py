"""A program: steps under ever more memory, until one has enough; each is done or not begun.

Prints whether steps were refused, or what a step changed that raised.
"""

import resource
import warnings

import torch
from gradients import sparse
from torch import Tensor, nn

import sketchoptim as so

ROWS, DIM, TOUCHED, TOKENS = 20_000, 64, 30_000, 1_000
STEP_BYTES, MOST_BYTES = 512 << 10, 256 << 20


def taken() -> int:
    """The bytes of the process's address space."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    table, bias = nn.Parameter(torch.ones(ROWS, DIM)), nn.Parameter(torch.ones(300, 300))
    head, hidden = nn.Parameter(torch.ones(ROWS, DIM)), torch.ones(TOKENS, DIM)
    optimizer = so.Adam([{"params": [table, head], "memory": "lean"}, {"params": [bias]}], lr=0.1)

    def set_gradients() -> None:
        ids = torch.randint(ROWS, (TOUCHED,), generator=generator)
        table.grad = sparse(ids, torch.ones(TOUCHED, DIM), table.shape)
        bias.grad = torch.ones_like(bias)
        head.grad = None
        so.nn.linear_cross_entropy(hidden, head, torch.arange(TOKENS)).backward()

    def tensors() -> list[Tensor]:
        states = (it for state in optimizer.state.values() for it in state.values())
        return [
            table.detach(),
            head.detach(),
            bias.detach(),
            *(it for it in states if isinstance(it, Tensor)),
        ]

    set_gradients()
    optimizer.step()  # threads, and what is kept from step to step
    set_gradients()
    before = [it.clone() for it in tensors()]
    refused = 0
    for extra in range(0, MOST_BYTES, STEP_BYTES):
        resource.setrlimit(resource.RLIMIT_AS, (taken() + extra, resource.RLIM_INFINITY))
        try:
            optimizer.step()
            break
        except (MemoryError, RuntimeError):
            refused += 1
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if not all(torch.equal(*it) for it in zip(tensors(), before, strict=True)):
            print("a step that raised has changed something, with", extra, "bytes")
            return
    changed = [not torch.equal(*it) for it in zip(tensors(), before, strict=True)]
    print("refused" if refused else "none was refused", "then done", sum(changed))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
