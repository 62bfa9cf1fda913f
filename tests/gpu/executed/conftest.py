"""Kernels are executed by the interpreter, or as PTX: `SKETCHOPTIM_PTX=sm_80`."""

import random
from collections.abc import Iterator
from unittest import mock

import pytest
from gpu_steps import IS_EXECUTED, IS_INTERPRETED, PTX_TARGET


@pytest.fixture(autouse=IS_EXECUTED)
def checking_launches(request: pytest.FixtureRequest) -> Iterator[None]:
    """Races and accesses out of bounds are found, and programs run in another order."""
    from sketchoptim.ops._gpu_launches import Launch

    run = Launch.run_
    if IS_INTERPRETED:
        import gpu_programs

        draw = random.Random(request.node.name)

        def run_(launch: Launch) -> None:
            gpu_programs.run_checked(run, launch, draw)
    else:
        import gpu_ptx

        assert PTX_TARGET is not None

        def run_(launch: Launch) -> None:
            gpu_ptx.execute(launch, PTX_TARGET)

    with mock.patch.object(Launch, "run_", run_):
        yield
