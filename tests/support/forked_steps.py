"""A program: one thread steps while another one forks; prints how many forked processes were right.

A forked process is right if both tables have taken the same steps, and take another one.
"""

import os
import signal
import sys
import threading
import time

import torch
from torch import nn

import sketchoptim as so

FORKS, SECONDS = 10, 20


def child(tables: list[nn.Parameter], optimizer: so.Adam) -> bool:
    # As in a worker of a DataLoader: GNU OpenMP's threads are gone in a forked process.
    torch.set_num_threads(1)
    is_same = torch.equal(*tables)
    optimizer.step()
    return is_same and torch.equal(*tables)


def forked(tables: list[nn.Parameter], optimizer: so.Adam) -> bool:
    process = os.fork()
    if process == 0:
        signal.alarm(SECONDS)
        os._exit(0 if child(tables, optimizer) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def main() -> int:
    tables = [nn.Parameter(torch.ones(3000, 32)) for _ in range(2)]
    for table in tables:
        table.grad = torch.full_like(table, 0.5)
    optimizer = so.Adam([{"params": tables, "memory": so.Memory(second=so.Exact())}], lr=0.01)
    optimizer.step()
    is_done = threading.Event()

    def steps() -> None:
        while not is_done.is_set():
            optimizer.step()

    thread = threading.Thread(target=steps)
    thread.start()
    right = 0
    for number in range(FORKS):
        time.sleep(0.003 * number)
        right += forked(tables, optimizer)
    is_done.set()
    thread.join()
    return right


if __name__ == "__main__":
    sys.setswitchinterval(1e-5)
    print(main(), "of", FORKS)
