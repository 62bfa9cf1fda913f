"""The programs in benchmarks/ run for minutes; here they are at least loaded, whole."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
PROGRAMS = sorted(path for path in FOLDER.glob("*.py") if not path.name.startswith("test_"))


def test_there_are_programs():
    assert len(PROGRAMS) > 3


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_finds_what_it_imports_and_says_how_it_is_called(path):
    specification = importlib.util.spec_from_file_location(path.stem, path)
    program = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(program)
    assert f"python benchmarks/{path.name}" in program.__doc__
    assert callable(program.main)
