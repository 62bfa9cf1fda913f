"""What every test shares: the same examples on every run, and one thread for tiny tensors."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=False)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """More threads only wait for one another here, for long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
