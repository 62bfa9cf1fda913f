import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from sketchoptim._cli import build_app
from experiments import checkpoints
from experiments.checkpoints import (
    MismatchError,
    TimedCheckpoints,
    load_checkpoint,
    read_json,
    save_checkpoint,
)
from experiments.data import DataSettings
from experiments.models import ModelSettings
from experiments.recipes import Setting
from experiments.runs import run_in, smooth_losses
from experiments.settings import TrainSettings
from experiments.tasks import NextWords
from experiments.training import Training

TIMES = {"seconds", "cpu_seconds", "step_seconds", "update_seconds", "rows_a_second"}
VARYING = TIMES | {"peak_memory_bytes", "machine"}
RECIPE = """
title = "A small text"
reference = "none"
[data]
kind = "text"
path = "text.txt"
held_out = 0.1
[small]
about = "tiny"
test_words = 200
log_every = 1
[small.model]
dim = 8
hidden = 8
layers = 2
samples = 5
dropout = 0.2
[small.train]
table_lr = 0.05
steps = 120
batch = 4
length = 5
evaluate_every = 10
evaluate_words = 100
[methods.lean]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text to train on, and the recipe for it."""
    folder = tmp_path_factory.mktemp("recipe")
    lines = (" ".join(str(i * i % 37) for i in range(n, n + 9)) + "\n" for n in range(200))
    (folder / "text.txt").write_text("".join(lines), encoding="utf-8")
    (folder / "tiny.toml").write_text(RECIPE, encoding="utf-8")
    return folder


@pytest.fixture
def setting(folder):
    return Setting(
        about="tiny",
        model=ModelSettings(dim=8, hidden=8, layers=2, samples=5, dropout=0.2),
        train=TrainSettings(table_lr=0.05, steps=12, batch=4, length=5, evaluate_every=4),
        data=DataSettings(kind="text", path=str(folder / "text.txt"), held_out=0.1),
        test_words=200,
        log_every=1,
    )


def without_times(result):
    kept = {key: value for key, value in result.items() if key not in VARYING}
    kept["evaluations"] = [(e["step"], e["quality"]) for e in result["evaluations"]]
    return kept


def log_of(folder):
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMES}
        for line in lines
    ]


def arguments(recipe, output):
    data = str(recipe / "text.txt")
    return ["train", str(recipe / "tiny.toml"), "--small", "--data", data, "--output", str(output)]


def test_a_killed_run_goes_on_and_ends_like_one_that_was_not(folder, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-m", "sketchoptim", *arguments(folder, killed)]
    process = subprocess.Popen([*command, "--checkpoint-seconds", "0"])
    deadline = time.monotonic() + 120
    while not (killed / "checkpoint.pt").exists() or len(log_of(killed)) < 20:
        assert time.monotonic() < deadline
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (killed / "result.json").exists()
    resumed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "going on from step" in resumed.stdout
    uninterrupted = CliRunner().invoke(build_app(), arguments(folder, whole))
    assert uninterrupted.exit_code == 0, uninterrupted.output
    first, second = (read_json(output / "result.json") for output in (killed, whole))
    assert without_times(first) == without_times(second)
    assert log_of(killed) == log_of(whole)
    assert [line["step"] for line in log_of(whole)] == list(range(1, 121))


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_restored_training_has_the_bits_of_the_one_that_was_saved(setting, tmp_path, stop):
    corpus = setting.data.read()
    settings = replace(setting.train, method="paper-mv")
    saved, restored = (Training(NextWords(corpus, setting.model), settings) for _ in range(2))
    for _ in saved.steps():
        if saved.step == stop:
            save_checkpoint(tmp_path / "checkpoint.pt", saved, about={})
    load_checkpoint(tmp_path / "checkpoint.pt", restored, about={})
    assert restored.step == stop
    assert len(list(restored.steps())) == 12 - stop
    assert restored.losses == saved.losses
    for one, other in zip(saved.model.parameters(), restored.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("seconds", "writing", "saved"),
    [(30, 0, [30, 60]), (10, 1, [10, 61]), (float("inf"), 1, [])],
)
def test_checkpoints_come_by_time_and_after_the_first_take_little_of_it(
    setting, tmp_path, monkeypatch, seconds, writing, saved
):
    clock, found = [0.0], []

    def save(path, training, *, about):
        found.append(clock[0])
        clock[0] += writing

    monkeypatch.setattr(checkpoints, "save_checkpoint", save)
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: clock[0])
    saves = TimedCheckpoints(tmp_path / "checkpoint.pt", about={}, seconds=seconds)
    for second in range(1, 90):
        clock[0] = max(clock[0], float(second))
        saves.save_if_due(None)
    assert found == saved


def test_a_checkpoint_of_other_settings_is_refused_with_what_differs(setting, tmp_path):
    training = Training(setting.task(), setting.train)
    next(training.steps())
    save_checkpoint(tmp_path / "checkpoint.pt", training, about={"seed": 1})
    with pytest.raises(MismatchError, match=r"was made with seed = 1, now 2; name another"):
        load_checkpoint(tmp_path / "checkpoint.pt", training, about={"seed": 2})


@pytest.mark.parametrize("content", [{"training": {}}, {"about": 3}, [1]])
def test_a_checkpoint_of_something_else_is_refused(content, setting, tmp_path):
    torch.save(content, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"checkpoint.pt must be the checkpoint of a run; remove"):
        run_in(tmp_path, setting, setting.train, console=Console(quiet=True))


@pytest.mark.parametrize("line", [b"no JSON", b"{}", b"3", b"\xff"])
def test_a_damaged_log_is_named_with_the_remedy(line, setting, tmp_path):
    (tmp_path / "log.jsonl").write_bytes(line + b"\n")
    with pytest.raises(ValueError, match=r"log.jsonl must be the log of a run: .*; remove it"):
        run_in(tmp_path, setting, setting.train, console=Console(quiet=True))


def test_a_finished_run_is_not_repeated(setting, tmp_path):
    console = Console(quiet=True)
    first = run_in(tmp_path, setting, setting.train, console=console)
    written = (tmp_path / "result.json").stat().st_mtime_ns
    assert run_in(tmp_path, setting, setting.train, console=console) == json.loads(
        json.dumps(first)
    )
    assert (tmp_path / "result.json").stat().st_mtime_ns == written
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_folder_with_another_run_is_refused(setting, tmp_path):
    console = Console(quiet=True)
    run_in(tmp_path, setting, setting.train, console=console)
    with pytest.raises(MismatchError, match=r"was made with train\.seed = 0, now 1; name"):
        run_in(tmp_path, setting, replace(setting.train, seed=1), console=console)


def test_the_result_of_other_data_is_refused(setting, folder, tmp_path):
    other = tmp_path / "text.txt"
    other.write_text((folder / "text.txt").read_text().replace("36", "35"), encoding="utf-8")
    console, run = Console(quiet=True), tmp_path / "run"
    run_in(run, setting, setting.train, console=console)
    with pytest.raises(MismatchError, match=r"result.json was made with data.sha256 = '\w+', now"):
        run_in(run, setting, setting.train, data=other, console=console)


def test_a_run_on_other_data_is_not_gone_on_with(setting, folder, tmp_path):
    other = tmp_path / "text.txt"
    other.write_text((folder / "text.txt").read_text().replace("36", "35"), encoding="utf-8")
    console, run = Console(quiet=True), tmp_path / "run"
    run_in(run, setting, setting.train, console=console)
    about = read_json(run / "result.json")["about"]
    (run / "result.json").unlink()
    save_checkpoint(run / "checkpoint.pt", Training(setting.task(), setting.train), about=about)
    with pytest.raises(MismatchError, match=r"checkpoint.pt was made with data.sha256 = '\w+'"):
        run_in(run, setting, setting.train, data=other, console=console)


def test_the_same_data_at_another_place_is_the_same(setting, folder, tmp_path):
    moved = tmp_path / "moved.txt"
    shutil.copy(folder / "text.txt", moved)
    console = Console(quiet=True)
    first = run_in(tmp_path / "run", setting, setting.train, console=console)
    again = run_in(tmp_path / "run", setting, setting.train, data=moved, console=console)
    assert again["valid"] == first["valid"]


def test_the_log_is_in_tensorboard_as_well(setting, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_in(tmp_path, setting, setting.train, console=Console(quiet=True))
    events = EventAccumulator(str(tmp_path)).Reload()
    shown = {event.step: event.value for event in events.Scalars("loss")}
    logged = {line["step"]: pytest.approx(line["loss"]) for line in log_of(tmp_path)}
    assert shown == logged
    assert [event.step for event in events.Scalars("valid")] == [4, 8, 12]


def test_a_diverged_run_has_a_result_that_says_so(setting, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "experiments.models.SampledSoftmax.forward",
        lambda self, hidden, labels, generator: hidden.sum() * torch.nan,
    )
    result = run_in(tmp_path, setting, setting.train, console=Console(quiet=True))
    assert result["valid"] is None
    assert "loss became nan at step 1" in read_json(tmp_path / "result.json")["diverged"]


def test_an_exploded_run_has_a_result_that_says_so(setting, tmp_path):
    settings = replace(setting.train, table_lr=1e9, steps=1)
    result = run_in(tmp_path, setting, settings, console=Console(quiet=True))
    assert result["test"] is None
    assert "lower table_lr = 1000000000.0" in result["diverged"]


def test_progress_shows_loss_rate_and_state(setting, tmp_path):
    console = Console(record=True, width=140, force_terminal=True)
    run_in(tmp_path, setting, setting.train, console=console)
    text = console.export_text()
    assert "12/12" in text
    for shown in ("loss ", " rows/s", "state "):
        assert shown in text


def test_smoothed_losses_are_means_of_equal_stretches():
    assert smooth_losses([1.0, 3.0, 5.0, 7.0, 9.0], points=3) == [(2, 2.0), (4, 6.0), (5, 9.0)]
