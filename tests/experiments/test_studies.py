"""Studies run for minutes; here they are imported, and answer to --help and to missing data."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import experiments.studies

FOLDER = Path(experiments.studies.__file__).parent
PROGRAMS = sorted(
    path.stem for path in FOLDER.glob("*.py") if not path.name.startswith(("test_", "__"))
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_study_says_how_it_is_called_and_has_a_main_function(name):
    study = importlib.import_module(f"experiments.studies.{name}")
    assert f"python -m experiments.studies.{name}" in study.__doc__
    assert callable(study.main)


def test_a_study_without_its_data_ends_with_one_line():
    environment = {name: text for name, text in os.environ.items() if name != "SKETCHOPTIM_DATA"}
    result = subprocess.run(
        [sys.executable, "-m", "experiments.studies.prediction"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: SKETCHOPTIM_DATA is not set; name the data with --data")
    assert "'wikitext-2'" in line
