"""The command that checks a GPU, with Triton's interpreter in place of one."""

import json
import time

import gpu_check_tasks as tasks
import pytest
from gpu_steps import IS_INTERPRETED
from typer.testing import CliRunner

from sketchoptim._cli import build_app
from sketchoptim.gpu_check import _run
from sketchoptim.gpu_check._place import Place
from sketchoptim.gpu_check._report import Report
from sketchoptim.gpu_check._run import results

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1")


def test_the_command_checks_the_kernels_and_writes_what_it_found(tmp_path):
    path = tmp_path / "found.json"
    arguments = ["check", "gpu", "--quick", "--device", "interpreter", "--json", str(path)]
    done = CliRunner().invoke(build_app(), arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    assert found["is_passed"]
    assert found["verdict"] == done.output.splitlines()[-1]
    by_name = {it["name"]: it for it in found["outcomes"]}
    assert by_name["8-bit, bfloat16, dense"]["units"] <= by_name["3 tables"]["limit"]
    assert by_name["deferred head"]["status"] == "passed"
    skipped = {name for name, it in by_name.items() if it["status"] == "skipped"}
    assert {"CUDA graph, 4 replays", "side stream", "second device"} <= skipped
    assert {"lean", "SparseAdam"} <= {it["method"] for it in found["timings"]}


def test_a_case_that_fails_or_kills_its_process_leaves_the_others_alone():
    chosen = [
        (task.__name__, task)
        for task in (
            tasks.passes,
            tasks.kills_its_process,
            tasks.raises_an_error,
            tasks.is_skipped,
            tasks.is_off,
            tasks.passes,
        )
    ]
    place = Place("interpreter", is_quick=True)
    report = Report({}, list(results(place, chosen, time.monotonic() + 60)))
    statuses = [outcome.status for outcome in report.outcomes]
    assert statuses == ["passed", "failed", "failed", "skipped", "failed", "passed"]
    messages = [outcome.message for outcome in report.outcomes]
    assert messages[1:5] == [
        "the process died, exit code 7",
        "RuntimeError: a / b",
        "there is none",
        "AssertionError: 5.0 units of the last place, at most 4.0",
    ]
    assert not report.is_passed


@pytest.mark.parametrize(
    ("constant", "status", "message"),
    [("_GRACE_SECONDS", "skipped", "out of time"), ("_MOST_SECONDS", "failed", "it takes more")],
)
def test_a_case_fails_if_it_takes_too_long_but_not_if_all_cases_do(
    monkeypatch, constant, status, message
):
    monkeypatch.setattr(_run, constant, 1.0)
    tasks_given = [("sleep", tasks.takes_too_long)]
    deadline = time.monotonic() + (0.5 if status == "skipped" else 60)
    [outcome] = results(Place("interpreter", is_quick=True), tasks_given, deadline)
    assert outcome.status == status
    assert outcome.message.startswith(message)


def test_a_gpu_that_is_not_there_ends_the_command_with_status_2():
    done = CliRunner().invoke(build_app(), ["check", "gpu"])
    assert done.exit_code == 2
    assert "torch finds no GPU" in done.output
