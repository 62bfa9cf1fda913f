import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import sketchoptim as so
from sketchoptim._cli import build_app, main
from experiments.checkpoints import read_json

LEAN_RUN = Path("runs") / "lean-0.1-0.003-seed0"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder of small Python files."""
    folder = tmp_path_factory.mktemp("sources")
    for number in range(40):
        lines = "".join(f"name{number % 7} = call(argument{line})\n" for line in range(20))
        (folder / f"file{number:02}.py").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def demo(sources, tmp_path_factory):
    """What a demo printed, and its folder, in which there were another run and an old one."""
    output = tmp_path_factory.mktemp("demo")
    for run, file in (("runs/mine", "events.out"), (LEAN_RUN, "result.json")):
        (output / run).mkdir(parents=True)
        (output / run / file).write_text("precious", encoding="utf-8")
    result = CliRunner().invoke(
        build_app(),
        ["demo", "--steps", "3", "--sources", str(sources), "--output", str(output)],
        env={"COLUMNS": "160"},
    )
    assert result.exit_code == 0, result.output
    return result.stdout, output


def test_demo_prints_both_methods_side_by_side(demo):
    printed, output = demo
    rows = [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines()]
    exact, lean = (
        next(row for row in rows if row[0] == title and len(row) > 5)
        for title in ("exact Adam", "lean (default)")
    )
    assert exact[4] == "100.000%"
    assert float(exact[1]) > 1
    assert float(lean[1]) > 1
    assert lean[3].split()[1] in {"B", "KB"}
    assert "exact Adam" in (output / "report.html").read_text(encoding="utf-8")


def test_demo_replaces_its_own_runs_and_no_others(demo):
    _, output = demo
    assert (output / "runs" / "mine" / "events.out").read_text(encoding="utf-8") == "precious"
    assert read_json(output / LEAN_RUN / "result.json")["steps"] == 3


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "wikitext3"], "one of .*wikitext2-adam.*, got 'wikitext3'"),
        (["train", "wikitext2-adam", "--method", "lion"], "method must be one of exact,.*'lion'"),
        (["train", "demo"], "recipe demo has no full size; it has small"),
        (["train", "wikitext2-adam", "--data", "nowhere"], "no data at nowhere: download wiki"),
        (["reproduce", "wikitext2-adam", "--data", "nowhere"], "no data at nowhere: download"),
        (["reproduce", "demo", "--small", "--methods", "lion"], "must be one of exact, lean, got"),
        (["reproduce", "demo", "--small", "--methods", "lean, lion"], "lean, got 'lion'"),
        (["reproduce", "demo", "--small", "--seeds", "one"], "seeds must be whole numbers"),
    ],
)
def test_what_cannot_be_trained_is_said_before_anything_is_done(tmp_path, arguments, message):
    result = CliRunner().invoke(
        build_app(),
        [*arguments, "--output", str(tmp_path / "output")],
        env={"NO_COLOR": "1", "COLUMNS": "400"},
    )
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr
    assert not (tmp_path / "output").exists()


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
    assert so.Plan.from_json(written) == expected


@pytest.mark.parametrize(
    ("name", "budget", "exact"),
    [
        ("lm1b", "156MB", 2 * 4 * (2 * 793_471 * 256 + 8192 * 2304 + 256 * 2048)),
        ("amazon", "25MB", 2 * 4 * 49_500_000 * 1024),
        ("recommender", "500MB", 2 * 4 * (1_200_000_250 * 64 + 512 * 192)),
    ],
)
def test_the_largest_tables_are_planned_to_the_byte(name, budget, exact, tmp_path):
    shapes = Path(__file__).parents[1] / "benchmarks" / "shapes" / f"{name}.toml"
    written = tmp_path / "plan.json"
    arguments = [str(shapes), "--budget", budget, "--json", str(written)]
    result = CliRunner().invoke(build_app(), ["plan", *arguments])
    assert result.exit_code == 0, result.output
    plan = so.Plan.from_json(written)
    assert plan.exact_bytes == exact
    assert 0.9 * plan.budget_bytes < plan.state_bytes <= plan.budget_bytes
    for name, memory in plan.memory.items():
        table = next(p for p in plan.parameters if p.name == name)
        counters = table.shape[0]
        if isinstance(memory.second, so.Sketched):
            # with a float32 scale, and four words of 64 bits for each hash row
            counters = 3 * memory.second.width + 1 + 3 * 4 * 2
        assert table.state_bytes == 4 * counters


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "10"], "budget must be at least"),
        (["--budget", "lots"], "budget must be like"),
        (["--budget", "1MB", "--optimizer", "Lion"], "--optimizer"),
        (["--budget", "1MB", "--beta2", "7"], "beta2"),
        (["--budget", "0.5"], 'budget must be whole bytes, or a share like "50%"'),
        (["--budget", "1MB", "--zipf", "-1"], "Invalid value for '--zipf'"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(shapes, arguments, message):
    result = CliRunner().invoke(
        build_app(), ["plan", str(shapes), *arguments], env={"NO_COLOR": "1", "COLUMNS": "300"}
    )
    assert result.exit_code == 2
    assert message in result.stderr


def test_inspect_prints_what_a_checkpoint_holds(tmp_path, monkeypatch, capsys):
    table = torch.nn.Embedding(1000, 8, sparse=True)
    optimizer = so.Adam(table.named_parameters())
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    monkeypatch.setattr(sys, "argv", ["sketchoptim", "inspect", str(tmp_path / "run.pt")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "second" in line)
    assert "by row, 3 x 41" in line
    assert f"{so.memory_report(optimizer).state_bytes:,}" in line


def test_inspect_says_what_is_wrong_with_a_file(shapes):
    result = CliRunner().invoke(
        build_app(), ["inspect", str(shapes)], env={"NO_COLOR": "1", "COLUMNS": "300"}
    )
    assert result.exit_code == 2
    assert "shapes.toml must be a checkpoint that torch.load reads" in result.stderr


RECIPE = """
title = "A small text"
reference = "none"
[data]
kind = "text"
held_out = 0.1
[small]
about = "tiny"
test_words = 200
[small.model]
dim = 8
hidden = 8
samples = 5
[small.train]
table_lr = 0.05
steps = 2
batch = 4
length = 5
[methods.sgd]
optimizer = "sgd"
[methods.lean]
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The working folder: a recipe, its text, and files that are not what they are named."""
    lines = (" ".join(str(i * i % 37) for i in range(n, n + 9)) + "\n" for n in range(200))
    files = {
        "tiny.toml": RECIPE,
        "words.toml": RECIPE.replace("steps = 2", 'steps = "two"'),
        "text.txt": "".join(lines),
        "bad.pt": "even a text may be named so",
        "bad.npy": "no array",
        "shapes.toml": SHAPES,
        "empty/result.json": "{}",
        "cut/result.json": "{",
        "damaged/checkpoint.pt": "cut off",
        "damaged/runs/lean-0.05-0.003-seed0/checkpoint.pt": "cut off",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKETCHOPTIM_CACHE", str(tmp_path / "cache"))
    return tmp_path


TRAIN = ["tiny.toml", "--small", "--data", "text.txt", "--output"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "words.toml"], "words: small.train.steps must be a whole number, got 'two'"),
        (["train", *TRAIN, "a", "--device", "cuda:99"], "device must be one that torch finds"),
        (["train", *TRAIN, "a", "--device", "foo"], "device must be cpu or cuda, got 'foo'"),
        (["train", *TRAIN, "empty"], "empty/result.json must be the result of a run; remove it"),
        (["train", *TRAIN, "cut"], "cut/result.json is not JSON"),
        (["train", *TRAIN, "damaged"], "checkpoint.pt must be a checkpoint that torch.load reads"),
        (["reproduce", *TRAIN, "a", "--device", "cuda:99"], "device must be one that torch finds"),
        (["reproduce", *TRAIN, "text.txt/a"], "Not a directory: 'text.txt/a'"),
        (
            ["reproduce", *TRAIN, "damaged", "--methods", "lean", "--seeds", "0"],
            "lean-0.05-0.003-seed0 ended with status 2; see above",
        ),
        (["plan", "shapes.toml", "--budget", "1GB", "--json", "no/a"], "No such file .* 'no/a'"),
        (["inspect", "bad.pt"], "bad.pt must be a checkpoint that torch.load reads by default"),
        (["bench", "--counts", "bad.npy"], "bad.npy must be a .npy or .npz file of numbers"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_user_can_mend_ends_in_a_message(work, arguments, message):
    result = CliRunner().invoke(build_app(), arguments, env={"NO_COLOR": "1", "COLUMNS": "400"})
    assert result.exit_code == 2, result.output
    assert re.search(message, result.stderr), result.stderr


def test_a_diverged_training_ends_with_status_1(work):
    arguments = ["train", *TRAIN, "a", "--table-lr", "1e25"]
    result = CliRunner().invoke(build_app(), arguments, env={"COLUMNS": "400"})
    assert result.exit_code == 1
    assert "diverged: gradients became too large at step 2 of method 'lean'" in result.stdout


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

    monkeypatch.setattr("sketchoptim.diagnostics._doctor.findings", broken)
    result = CliRunner().invoke(build_app(), ["doctor"])
    assert isinstance(result.exception, TypeError)
