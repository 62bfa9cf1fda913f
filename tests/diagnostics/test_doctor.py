"""`sketchoptim doctor`: which backend runs, and why."""

import os
from importlib.metadata import PackageNotFoundError

import pytest
from typer.testing import CliRunner

from sketchoptim import doctor
from sketchoptim._cli import build_app
from sketchoptim.ops import _native


def test_doctor_names_the_library_that_runs() -> None:
    result = CliRunner().invoke(build_app(), ["doctor"])
    assert result.exit_code == 0, result.output
    assert f"native kernels, level {_native.level()}" in result.stdout


def test_doctor_says_why_the_native_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"libsketchoptim_{name}.so was not built")

    monkeypatch.setattr(_native, "load", missing)
    backend = doctor().findings["cpu backend"]
    assert "reference kernels" in backend
    assert f"libsketchoptim_{_native.level()}.so was not built" in backend


def test_doctor_says_what_tables_in_files_find_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "rows are read alone; reserve=True works" in doctor().findings["tables in files"]
    monkeypatch.delattr(os, "posix_fallocate")
    assert "reserve=True is refused" in doctor().findings["tables in files"]


@pytest.mark.parametrize(
    ("triton", "expected"),
    [("3.7.1", "kernels in Triton, version 3.7.1"), (None, "slower: triton is not installed")],
)
def test_doctor_says_which_kernels_a_gpu_would_run(
    monkeypatch: pytest.MonkeyPatch, triton: str | None, expected: str
) -> None:
    def version(package: str) -> str:
        if package != "triton":
            return "1"
        if triton is None:
            raise PackageNotFoundError(package)
        return triton

    monkeypatch.setattr("sketchoptim.diagnostics._doctor.version", version)
    assert doctor().findings["gpu backend"].endswith(expected)
