"""What every test shares: the same examples on every run, and one thread."""

import torch
from hypothesis import settings

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=50, print_blob=False
)
settings.load_profile("repeatable")

# The tests' tensors are small: a second thread only waits, and on a busy machine for long.
torch.set_num_threads(1)
