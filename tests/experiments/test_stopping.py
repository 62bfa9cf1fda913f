"""Runs that are stopped or killed, and continue."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from rich.console import Console

from experiments.checkpoints import read_json
from experiments.errors import StoppedError
from experiments.runs import run_in
from experiments.stopping import StopRequest
from experiments.tasks import NextWords

QUIET = Console(quiet=True)
STEPS = 300
VARYING = {
    *("seconds", "cpu_seconds", "step_seconds", "update_seconds", "rows_a_second"),
    *("peak_memory_bytes", "machine", "evaluations"),
}
COMMAND = [sys.executable, "-m", "experiments"]


def arguments(command, tiny, output):
    options = ["--small", "--steps", str(STEPS), "--data", str(tiny / "text.txt")]
    return [command, str(tiny / "tiny.toml"), *options, "--output", str(output)]


def logged_steps(folder):
    log = folder / "log.jsonl"
    return log.read_text(encoding="utf-8").count("\n") if log.exists() else 0


def start(command, run, *, file="log.jsonl"):
    """A process that has done 20 steps of the run in a folder, and has written the file there."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # with a process group of its own
    )
    deadline = time.monotonic() + 120
    while logged_steps(run) < 20 or not (run / file).exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    return process


def without_times(folder):
    result = read_json(folder / "result.json")
    kept = {key: value for key, value in result.items() if key not in VARYING}
    return kept, [(point["step"], point["quality"]) for point in result["evaluations"]]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    command = [*COMMAND, *arguments("train", tiny, folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_a_killed_run_continues_and_ends_like_one_that_was_not(tiny, whole, tmp_path):
    command = [*COMMAND, *arguments("train", tiny, tmp_path)]
    process = start([*command, "--checkpoint-seconds", "0"], tmp_path, file="checkpoint.pt")
    process.kill()
    process.communicate()
    assert not (tmp_path / "result.json").exists()
    resumed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "continuing from step" in resumed.stdout
    assert without_times(tmp_path) == without_times(whole)
    assert logged_steps(tmp_path) == STEPS


def test_a_stopped_run_is_saved_and_prints_the_command_that_continues_it(tiny, whole, tmp_path):
    process = start([*COMMAND, *arguments("train", tiny, tmp_path)], tmp_path)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    stopped, command = printed.splitlines()
    assert stopped.startswith("stopped after step ")
    assert stopped.endswith(f"of {STEPS}, which is saved in {tmp_path / 'checkpoint.pt'}")
    continued = shlex.split(command.removeprefix("continue with: "))
    resumed = subprocess.run(continued, capture_output=True, text=True, check=True)
    assert "continuing from step" in resumed.stdout
    assert without_times(tmp_path) == without_times(whole)


# a terminal sends Ctrl-C to the run as well, `kill` does not
@pytest.mark.parametrize("send", [os.killpg, os.kill])
def test_a_stopped_reproduction_waits_for_its_run_to_be_saved(tiny, tmp_path, send):
    run = tmp_path / "runs" / "lean-0.05-0.003-seed0"
    command = [*COMMAND, *arguments("reproduce", tiny, tmp_path)]
    process = start([*command, "--methods", "lean", "--seeds", "0"], run)
    send(process.pid, signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert (run / "checkpoint.pt").exists()
    *_, kept, continued = printed.splitlines()
    assert kept == "stopped; finished runs are kept"
    assert continued.endswith(shlex.join([*command[3:], "--methods", "lean", "--seeds", "0"]))
    assert printed.count("continue with") == 1


def test_a_run_that_is_stopped_while_it_is_measured_keeps_its_steps(setting, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    settings = replace(setting.train, evaluate_every=0)
    with monkeypatch.context() as patch:
        patch.setattr(NextWords, "measure", interrupted)
        with pytest.raises(StoppedError, match="after step 12 of 12"):
            run_in(tmp_path, setting, settings, console=QUIET)
    (tmp_path / "log.jsonl").unlink()
    assert run_in(tmp_path, setting, settings, console=QUIET)["steps"] == 12
    assert logged_steps(tmp_path) == 0


def test_the_second_ctrl_c_stops_at_once():
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.is_made
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_signals_have_their_former_handlers_after_a_run():
    former = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == former


def test_a_run_in_another_thread_leaves_signals_alone():
    found = []

    def run():
        with StopRequest():
            found.append(signal.getsignal(signal.SIGINT))

    former = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [former]
