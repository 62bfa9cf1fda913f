"""Kernels are executed by the interpreter, or as PTX: `SKETCHOPTIM_PTX=sm_80`."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest

TARGET = os.environ.get("SKETCHOPTIM_PTX")


@pytest.fixture(autouse=TARGET is not None)
def executing_ptx() -> Iterator[None]:
    assert TARGET is not None
    import gpu_ptx

    from sketchoptim.ops._gpu_launches import Launch

    with mock.patch.object(Launch, "run_", lambda it: gpu_ptx.execute(it, TARGET)):
        yield
