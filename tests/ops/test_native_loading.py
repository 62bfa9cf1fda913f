"""Finding the library: what it must be, and what happens where it is absent."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backends import LEVELS, library, needs_native

import sketchoptim as so
from sketchoptim.ops import _native

HEADER = Path(__file__).parents[2] / "csrc" / "abi.h"


def step() -> None:
    table = torch.nn.Embedding(9, 4, sparse=True)
    optimizer = so.Adam(table.parameters())
    table(torch.tensor([1, 2])).square().sum().backward()
    optimizer.step()


def test_without_a_library_the_reference_steps_with_one_warning(without_kernels):
    reason = r"reference kernels, .*libsketchoptim_v9\.so was not built; .*C\+\+ compiler is found$"
    with pytest.warns(UserWarning, match=reason) as warned:
        step()
    assert len(warned) == 1
    step()  # a second warning would be an error


def test_without_a_library_that_is_required_a_step_raises(without_kernels, monkeypatch):
    monkeypatch.setenv("SKETCHOPTIM_REQUIRE_NATIVE", "1")
    for _ in range(2):
        with pytest.raises(ImportError, match=r"SKETCHOPTIM_REQUIRE_NATIVE=1, .*_v9\.so was not"):
            step()


def test_a_program_that_requires_the_library_ends_without_it():
    program = """
import sketchoptim as so, torch
from sketchoptim.ops import _native
_native.level = lambda: "v9"
parameter = torch.nn.Parameter(torch.ones(3, 2))
parameter.grad = torch.ones(3, 2)
so.Adam([{"params": [parameter], "memory": "lean-0.1"}]).step()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "SKETCHOPTIM_REQUIRE_NATIVE": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode != 0
    assert "ImportError: SKETCHOPTIM_REQUIRE_NATIVE=1" in ended.stderr


@needs_native
def test_a_library_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(_native, "_ABI", _native._ABI + 1)
    with pytest.raises(OSError, match="another version of sketchoptim; install it again"):
        _native.load(LEVELS[-1])


@needs_native
def test_a_library_of_another_version_is_told_with_its_own_remedy(monkeypatch):
    monkeypatch.setattr(_native, "_ABI", _native._ABI + 1)
    monkeypatch.delenv("SKETCHOPTIM_REQUIRE_NATIVE", raising=False)
    with pytest.warns(UserWarning, match="slower: .* of another version .*; install it again$"):
        assert _native.library.__wrapped__() is None


@needs_native
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_speaks_the_version_of_this_package(level):
    assert library(level).sketchoptim_abi() == _native._ABI


@pytest.mark.parametrize(
    ("capability", "level"),
    [("AVX512", "v4"), ("AVX2", "v3"), ("DEFAULT", "base"), ("SVE256", "base")],
)
def test_the_level_is_the_best_that_torch_reports(monkeypatch, capability, level):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert _native.level() == level


# -- the two sides of the interface --------------------------------------------------------------

TYPES = {
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "Gradient": _native.Gradient,
    "Moment": _native.Moment,
}


def fields_in_header(struct: str) -> list[tuple[str, object]]:
    body = re.search(rf"struct {struct} {{(.*?)\n}};", HEADER.read_text(), re.DOTALL)
    assert body is not None
    lines = [line.split("//")[0].strip() for line in body[1].splitlines()]
    fields = []
    for line in filter(None, lines):
        declared = re.fullmatch(r"(?:const )?(\w+)(\*?) (\w+);", line)
        assert declared is not None, line
        kind, star, name = declared.groups()
        fields.append((name, ctypes.c_void_p if star else TYPES[kind]))
    return fields


@pytest.mark.parametrize(
    "struct", [_native.Moment, _native.Gradient, _native.Step, _native.Lookups, _native.Calls]
)
def test_every_struct_mirrors_the_header_field_by_field(struct):
    assert [tuple(field) for field in struct._fields_] == fields_in_header(struct.__name__)


def test_the_version_is_that_of_the_header():
    version = re.search(r"#define SKETCHOPTIM_ABI (\d+)", HEADER.read_text())
    assert version is not None
    assert int(version[1]) == _native._ABI


def test_every_function_of_the_interface_that_is_called_has_its_types():
    folder = Path(_native.__file__).parent
    called = {
        name
        for path in folder.glob("*.py")
        for name in re.findall(r"library\.(sketchoptim_\w+)\(", path.read_text(encoding="utf-8"))
    }
    library = _native.load(_native.level())
    lacking = {name for name in called if getattr(library, name).argtypes is None}
    assert lacking <= {"sketchoptim_abi"}  # which takes nothing
