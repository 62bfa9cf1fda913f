"""What every test shares: the same examples on every run, and one thread for tiny tensors."""

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from sketchoptim.ops import _native

# Modules beside the tests whose asserts are to say as much as a test's own.
pytest.register_assert_rewrite("refusals", "torch_twins")

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=50, print_blob=False
)
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no search for garbage goes through them once more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """More threads only wait for one another here, for long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def every_warning() -> Iterator[None]:
    """What torch would say once in a process it says in every test, whichever comes first."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.fixture(scope="session", autouse=True)
def known_backend() -> None:
    """Where no kernels were built, that is said once, before warnings are errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "sketchoptim runs on its reference kernels")
        _native.library()


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine for whose level nothing was built."""
    monkeypatch.setattr(_native, "level", lambda: "v9")
    monkeypatch.delenv("SKETCHOPTIM_REQUIRE_NATIVE", raising=False)
    _native.library.cache_clear()
    yield
    _native.library.cache_clear()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A device mesh of this one process."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    from torch.distributed.device_mesh import init_device_mesh

    meeting = tmp_path_factory.mktemp("mesh") / "meet"
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()
