import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import sketchoptim as so
from sketchoptim._cli import build_app, main

SHAPES_FOLDER = Path(__file__).parents[1] / "experiments" / "studies" / "shapes"
ENVIRONMENT = {"NO_COLOR": "1", "COLUMNS": "300"}


def test_a_missing_dependency_is_answered_with_what_to_install():
    program = "import sys; sys.modules['typer'] = None; from sketchoptim._cli import main; main()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install 'sketchoptim[cli]'" in result.stderr


SHAPES = """
[[tables]]
name = "embedding"
shape = [793471, 256]

[[dense]]
name = "lstm"
shape = [64, 64]
"""


@pytest.fixture
def shapes(tmp_path):
    path = tmp_path / "shapes.toml"
    path.write_text(SHAPES, encoding="utf-8")
    return path


def test_plan_prints_and_writes_what_the_library_plans(shapes, tmp_path):
    written = tmp_path / "plan.json"
    arguments = ["--budget", "250KB", "--zipf", "0.9", "--ids-per-step", "1000"]
    result = CliRunner().invoke(
        build_app(), ["plan", str(shapes), *arguments, "--json", str(written)]
    )
    assert result.exit_code == 0, result.output
    expected = so.plan(shapes, "250KB", zipf=0.9, ids_per_step=1000)
    assert result.stdout == f"{expected}\n"
    assert so.planning.Plan.from_json(written) == expected


@pytest.mark.parametrize(
    ("name", "budget", "exact"),
    [
        ("lm1b", "156MB", 2 * 4 * (2 * 793_471 * 256 + 8192 * 2304 + 256 * 2048)),
        ("amazon", "25MB", 2 * 4 * 49_500_000 * 1024),
        ("recommender", "500MB", 2 * 4 * (1_200_000_250 * 64 + 512 * 192)),
    ],
)
def test_the_largest_tables_are_planned_to_the_byte(name, budget, exact, tmp_path):
    shapes = SHAPES_FOLDER / f"{name}.toml"
    written = tmp_path / "plan.json"
    arguments = [str(shapes), "--budget", budget, "--json", str(written)]
    result = CliRunner().invoke(build_app(), ["plan", *arguments])
    assert result.exit_code == 0, result.output
    plan = so.planning.Plan.from_json(written)
    assert plan.exact_bytes == exact
    assert 0.9 * plan.budget_bytes < plan.state_bytes <= plan.budget_bytes
    for name, memory in plan.memory.items():
        table = next(p for p in plan.parameters if p.name == name)
        numbers = table.shape[0]
        if isinstance(memory.second, so.Sketched):
            # with a float32 scale, and four words of 64 bits for each hash row
            numbers = 3 * memory.second.width + 1 + 3 * 4 * 2
        numbers += memory.second.columns * table.shape[1]
        assert table.state_bytes == 4 * numbers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "10"], "budget must be at least"),
        (["--budget", "lots"], "budget must be like"),
        (["--budget", "1MB", "--optimizer", "Lion"], "--optimizer"),
        (["--budget", "1MB", "--beta2", "7"], "beta2"),
        (["--budget", "0.5"], 'budget must be whole bytes, or a share like "50%"'),
        (["--budget", "1MB", "--zipf", "-1"], "Invalid value for '--zipf'"),
        (["--budget", "1GB", "--json", "no/a"], "No such file or directory: 'no/a'"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(shapes, arguments, message):
    result = CliRunner().invoke(build_app(), ["plan", str(shapes), *arguments], env=ENVIRONMENT)
    assert result.exit_code == 2
    assert message in result.stderr


def test_inspect_prints_what_a_checkpoint_holds(tmp_path, monkeypatch, capsys):
    table = torch.nn.Embedding(5000, 8, sparse=True)
    optimizer = so.Adam(table.named_parameters())
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    monkeypatch.setattr(sys, "argv", ["sketchoptim", "inspect", str(tmp_path / "run.pt")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "second" in line)
    assert "by row x column, 3 x 208" in line
    assert f"{so.memory_report(optimizer).state_bytes:,}" in line


def test_inspect_says_what_is_wrong_with_a_file(shapes):
    result = CliRunner().invoke(build_app(), ["inspect", str(shapes)])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: shapes.toml must be a checkpoint that torch.load reads")


def test_the_command_line_has_the_commands_of_the_library_alone():
    names = {command.callback.__name__ for command in build_app().registered_commands}
    assert names == {"plan", "inspect", "doctor"}


def test_the_version_is_printed():
    result = CliRunner().invoke(build_app(), ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"sketchoptim {so.__version__}\n")
    assert f"sketchoptim: {so.__version__}\n" in CliRunner().invoke(build_app(), ["doctor"]).stdout


def test_a_pipe_that_closes_ends_a_command_silently(shapes):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "sketchoptim", "plan", str(shapes), "--budget", "250KB"]
    with open(writer, "wb") as closed:
        result = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, check=False)
    assert (result.returncode, result.stderr) == (1, b"")


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    def broken():
        raise TypeError("a mistake")

    monkeypatch.setattr("sketchoptim.diagnostics.doctor", broken)
    result = CliRunner().invoke(build_app(), ["doctor"])
    assert isinstance(result.exception, TypeError)
