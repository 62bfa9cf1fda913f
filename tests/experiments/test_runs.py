import json
import shutil
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from experiments import checkpoints
from experiments.checkpoints import (
    MismatchError,
    TimedCheckpoints,
    load_checkpoint,
    read_json,
    save_checkpoint,
)
from experiments.locks import locked
from experiments.runs import run_in
from experiments.tasks import NextWords
from experiments.training import Training

QUIET = Console(quiet=True)
TIMES = {"seconds", "cpu_seconds", "step_seconds", "update_seconds", "rows_a_second"}


@pytest.fixture
def other_text(tiny, tmp_path):
    text = (tiny / "text.txt").read_text(encoding="utf-8")
    path = tmp_path / "text.txt"
    path.write_text(text.replace("36", "35"), encoding="utf-8")
    return path


def read_log(folder):
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMES}
        for line in lines
    ]


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
    tmp_path, monkeypatch, seconds, writing, saved
):
    clock, found = [0.0], []

    def save(path, training, *, about):
        found.append(clock[0])
        clock[0] += writing

    monkeypatch.setattr(checkpoints, "save_checkpoint", save)
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: clock[0])
    timed = TimedCheckpoints(tmp_path / "checkpoint.pt", about={}, seconds=seconds)
    for second in range(1, 90):
        clock[0] = max(clock[0], float(second))
        timed.save_if_due(None)
    assert found == saved


@pytest.mark.parametrize("content", [{"training": {}}, {"about": 3}, [1]])
def test_a_checkpoint_of_something_else_is_refused(content, setting, tmp_path):
    torch.save(content, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"checkpoint.pt must be the checkpoint of a run; remove"):
        run_in(tmp_path, setting, setting.train, console=QUIET)


@pytest.mark.parametrize("line", [b"no JSON", b"{}", b"3", b"\xff"])
def test_a_damaged_log_is_named_with_the_remedy(line, setting, tmp_path):
    (tmp_path / "log.jsonl").write_bytes(line + b"\n")
    with pytest.raises(ValueError, match=r"log.jsonl must be the log of a run: .*; remove it"):
        run_in(tmp_path, setting, setting.train, console=QUIET)


def test_a_finished_run_is_not_repeated(setting, tmp_path):
    first = run_in(tmp_path, setting, setting.train, console=QUIET)
    written = (tmp_path / "result.json").stat().st_mtime_ns
    again = run_in(tmp_path, setting, setting.train, console=QUIET)
    assert again == json.loads(json.dumps(first))
    assert (tmp_path / "result.json").stat().st_mtime_ns == written
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_folder_with_a_run_of_other_settings_is_refused(setting, tmp_path):
    run_in(tmp_path, setting, setting.train, console=QUIET)
    with pytest.raises(MismatchError, match=r"was made with train\.seed = 0, now 1; name another"):
        run_in(tmp_path, setting, replace(setting.train, seed=1), console=QUIET)


def test_settings_of_another_memory_differ_by_its_kind(setting, tmp_path):
    run_in(tmp_path, setting, replace(setting.train, method="row-wise"), console=QUIET)
    with pytest.raises(MismatchError, match=r"second.kind = 'RowWise', now 'Sketched'; train\."):
        run_in(tmp_path, setting, setting.train, console=QUIET)


def test_a_result_of_other_data_is_refused(setting, other_text, tmp_path):
    run_in(tmp_path / "run", setting, setting.train, console=QUIET)
    with pytest.raises(MismatchError, match=r"result.json was made with data.sha256 = '\w+', now"):
        run_in(tmp_path / "run", setting, setting.train, data=other_text, console=QUIET)


def test_a_checkpoint_of_other_data_is_refused(setting, other_text, tmp_path):
    run = tmp_path / "run"
    run_in(run, setting, setting.train, console=QUIET)
    about = read_json(run / "result.json")["about"]
    (run / "result.json").unlink()
    save_checkpoint(run / "checkpoint.pt", Training(setting.task(), setting.train), about=about)
    with pytest.raises(MismatchError, match=r"checkpoint.pt was made with data.sha256 = '\w+'"):
        run_in(run, setting, setting.train, data=other_text, console=QUIET)


def test_the_same_data_at_another_place_is_the_same(setting, tiny, tmp_path):
    moved = tmp_path / "moved.txt"
    shutil.copy(tiny / "text.txt", moved)
    first = run_in(tmp_path / "run", setting, setting.train, console=QUIET)
    again = run_in(tmp_path / "run", setting, setting.train, data=moved, console=QUIET)
    assert again["valid"] == first["valid"]


def test_a_folder_that_another_run_writes_to_is_refused(setting, tmp_path):
    with (
        locked(tmp_path / "run"),
        pytest.raises(ValueError, match=f"another run is writing to {tmp_path / 'run'}; wait"),
    ):
        run_in(tmp_path / "run", setting, setting.train, console=QUIET)
    assert run_in(tmp_path / "run", setting, setting.train, console=QUIET)["steps"] == 12


def test_the_log_is_in_tensorboard_as_well(setting, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_in(tmp_path, setting, setting.train, console=QUIET)
    events = EventAccumulator(str(tmp_path)).Reload()
    shown = {event.step: event.value for event in events.Scalars("loss")}
    logged = {line["step"]: pytest.approx(line["loss"]) for line in read_log(tmp_path)}
    assert shown == logged
    assert [event.step for event in events.Scalars("valid")] == [4, 8, 12]


def test_a_diverged_run_has_a_result_that_says_so(setting, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "experiments.models.SampledSoftmax.forward",
        lambda self, hidden, labels, generator: hidden.sum() * torch.nan,
    )
    result = run_in(tmp_path, setting, setting.train, console=QUIET)
    assert result["valid"] is None
    assert "loss became nan at step 1" in read_json(tmp_path / "result.json")["diverged"]
