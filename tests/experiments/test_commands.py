import html
import re
import sys
from pathlib import Path

import pytest
from tiny_recipe import RECIPE, write_recipe
from typer.testing import CliRunner

from experiments.checkpoints import read_json
from experiments.commands import build_app
from experiments.locks import locked

LEAN_RUN = Path("runs") / "lean-0.1-0.003-seed0"
TRAIN = ["tiny.toml", "--small", "--data", "text.txt", "--output"]


def invoke(*arguments, columns=400):
    environment = {"NO_COLOR": "1", "COLUMNS": str(columns)}
    return CliRunner().invoke(build_app(), [*map(str, arguments)], env=environment)


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
    """The output of a demo, and its folder, in which were another run and an old one."""
    output = tmp_path_factory.mktemp("demo")
    for run, file in (("runs/mine", "events.out"), (LEAN_RUN, "result.json")):
        (output / run).mkdir(parents=True)
        (output / run / file).write_text("precious", encoding="utf-8")
    options = ["--steps", "3", "--sources", sources, "--output", output]
    result = invoke("demo", *options, columns=160)
    assert result.exit_code == 0, result.output
    return result.stdout, output


def test_demo_prints_both_methods_side_by_side_and_one_sentence(demo):
    printed, output = demo
    rows = [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines()]
    exact, lean = (
        next(row for row in rows if row[0] == title and len(row) == 5)
        for title in ("SparseAdam", "lean (default)")
    )
    assert float(exact[1]) > 1
    assert float(lean[1]) > 1
    units = {"B": 1, "KB": 1e3, "MB": 1e6}
    exact_bytes, lean_bytes = (
        float(number) * units[unit] for number, unit in (exact[2].split(), lean[2].split())
    )
    assert 0 < lean_bytes < exact_bytes / 20
    sentence = f"lean keeps {lean[2]} of optimizer state for the tables instead of SparseAdam's"
    assert sentence in " ".join(printed.split())
    page = (output / "report.html").read_text(encoding="utf-8")
    assert html.escape(sentence) in page
    for cell in (*exact, *lean):
        assert f"<td>{cell}</td>" in page


def test_demo_replaces_its_own_runs_and_no_others(demo):
    _, output = demo
    assert (output / "runs" / "mine" / "events.out").read_text(encoding="utf-8") == "precious"
    assert read_json(output / LEAN_RUN / "result.json")["steps"] == 3


def test_a_resumed_demo_keeps_its_runs_and_fits_60_columns(demo, sources):
    _, output = demo
    written = (output / LEAN_RUN / "result.json").stat().st_mtime_ns
    options = ["--steps", "3", "--sources", sources, "--output", output, "--resume"]
    result = invoke("demo", *options, columns=60)
    assert result.exit_code == 0, result.output
    assert (output / LEAN_RUN / "result.json").stat().st_mtime_ns == written
    lines = [line for line in result.stdout.splitlines() if str(output) not in line]
    assert max(len(line.rstrip()) for line in lines) <= 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--steps", "0"], "--steps"),
        (["demo", "--threads", "0"], "--threads"),
        (["demo", "--sources", "no-such-folder"], "--sources"),
    ],
)
def test_bad_options_are_named(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "wikitext3"], "one of .*wikitext2-adam.*, got 'wikitext3'"),
        (["train", "wikitext2-adam", "--method", "lion"], "method must be one of exact,.*'lion'"),
        (["train", "demo"], "recipe demo has no full size; it has small"),
        (["train", "wikitext2-adam", "--data", "nowhere"], "no data at nowhere; .*: download wiki"),
        (["reproduce", "wikitext2-adam"], "SKETCHOPTIM_DATA is not set; .*: download wikitext-2"),
        (["reproduce", "megaface-lsh", "--small"], "wordllama; run: pip install wordllama"),
        (
            ["reproduce", "demo", "--small", "--methods", "lion"],
            "must be one of sparse-adam, lean, got",
        ),
        (["reproduce", "demo", "--small", "--methods", "lean, lion"], "lean, got 'lion'"),
        (["reproduce", "demo", "--small", "--seeds", "one"], "seeds must be whole numbers"),
    ],
)
def test_a_run_that_is_impossible_ends_with_one_line_before_anything_is_written(
    tmp_path, monkeypatch, arguments, message
):
    monkeypatch.delenv("SKETCHOPTIM_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "wordllama", None)
    result = invoke(*arguments, "--output", tmp_path / "output")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert re.search(f"^error: .*{message}", line), line
    assert not (tmp_path / "output").exists()


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The working folder: a recipe, its text, and files with the wrong content."""
    write_recipe(tmp_path, RECIPE.replace("steps = 12", "steps = 2"))
    files = {
        "words.toml": RECIPE.replace("steps = 12", 'steps = "two"'),
        "bad.npy": "no array",
        "empty/result.json": "{}",
        "cut/result.json": "{",
        "damaged/checkpoint.pt": "cut off",
        "damaged/runs/lean-0.05-0.003-seed0/checkpoint.pt": "cut off",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
        (["bench", "--counts", "bad.npy"], "bad.npy must be a .npy or .npz file of numbers"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_that_the_user_can_fix_is_one_line(work, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert re.search(f"^error: .*{message}", line), line


@pytest.mark.parametrize(
    "arguments",
    [["train", *TRAIN, "output"], ["reproduce", *TRAIN, "output"], ["bench", "--output", "output"]],
    ids=lambda arguments: arguments[0],
)
def test_a_second_run_into_a_folder_is_refused(work, arguments):
    with locked(work / "output"):
        result = invoke(*arguments)
    assert result.exit_code == 2
    assert "another run is writing to output; wait for it, or name another" in result.stderr


def test_a_missing_package_is_one_line(work, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    result = invoke("train", *TRAIN, "output")
    assert result.exit_code == 2
    line = "error: the package tensorboard is not installed; run: pip install tensorboard\n"
    assert result.stderr == line


def test_a_diverged_training_ends_with_status_1(work):
    result = invoke("train", *TRAIN, "a", "--table-lr", "1e25")
    assert result.exit_code == 1
    assert "diverged: gradients became too large at step 2 of method 'lean'" in result.stdout


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    def broken(*_, **__):
        raise TypeError("a mistake")

    monkeypatch.setattr("experiments.commands.load_recipe", broken)
    assert isinstance(invoke("train", "demo").exception, TypeError)
