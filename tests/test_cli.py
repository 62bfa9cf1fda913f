import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sketchoptim.cli import build_app


@pytest.fixture
def sources(tmp_path):
    """A folder of small Python files."""
    for number in range(40):
        lines = "".join(f"name{number % 7} = call(argument{line})\n" for line in range(20))
        (tmp_path / f"file{number:02}.py").write_text(lines, encoding="utf-8")
    return tmp_path


def test_demo_prints_both_methods_side_by_side(sources):
    result = CliRunner().invoke(
        build_app(),
        ["demo", "--steps", "3", "--seed", "1", "--sources", str(sources)],
        env={"COLUMNS": "120"},
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    exact, lean = (
        next(line for line in lines if line.startswith("│") and title in line).split("│")
        for title in ("exact Adam", "lean (default)")
    )
    assert "100.000%" in exact[4]
    assert float(exact[2]) > 1
    assert float(lean[2]) > 1
    assert lean[3].split()[1] in {"B", "KB"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps"),
        (["--threads", "0"], "--threads"),
        (["--sources", "no-such-folder"], "--sources"),
    ],
)
def test_bad_options_are_named(arguments, message):
    result = CliRunner().invoke(build_app(), ["demo", *arguments], env={"NO_COLOR": "1"})
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_missing_dependency_is_answered_with_what_to_install():
    program = "import sys; sys.modules['typer'] = None; from sketchoptim.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install 'sketchoptim[cli]'" in result.stderr
