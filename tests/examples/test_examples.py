"""Every script of examples/ learns as it is, and says so by its status if it does not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
# As a user would see them: advice of ours that an example should have followed.
OUR_WARNINGS = re.compile(r"UserWarning: .*(sketchoptim|so\.)")


def run(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Models this small gain nothing from threads, which wait for one another on a busy machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launcher = several if script == "fsdp2.py" else []
    command = [sys.executable, *launcher, str(FOLDER / script), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_learns_and_prints_its_state(script, tmp_path):
    result = run(script, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"before training, .* after$", result.stdout, re.MULTILINE)
    assert "state" in result.stdout
    assert not OUR_WARNINGS.search(result.stderr), result.stderr
    assert not list(tmp_path.iterdir()), "an example leaves no files behind"


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_that_did_not_learn_ends_with_an_error(script, tmp_path):
    result = run(script, tmp_path, "--steps", "1")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "the model did not learn" in result.stderr


def test_the_readme_lists_every_example():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[(\w+\.py)\]", page, re.MULTILINE)) == SCRIPTS
