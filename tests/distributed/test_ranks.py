"""The launches themselves: every rank runs, a failure in one is seen, and no process is left."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import torchrun

SUPPORT = Path(__file__).parents[1] / "support"
FAILING = """
import os, signal
import torch
import torch.distributed as dist
from ranks import on_ranks

@on_ranks(2)
def test_one_rank_fails():
    assert dist.get_rank() == 0, "seen in rank one"
    dist.barrier()

@on_ranks(2)
def test_that_follows():
    dist.barrier()

@on_ranks(2)
def test_one_rank_is_killed():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
"""
HANGING = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
(folder / f"{os.getpid()}.pid").touch()
while len(list(folder.glob("*.pid"))) < 2:
    time.sleep(0.01)
if os.environ["RANK"] == "0":
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(600)
"""


def test_a_failure_of_one_rank_fails_its_test_and_no_other(tmp_path):
    (tmp_path / "test_failing.py").write_text(FAILING)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts="]
    found = subprocess.run(
        [*command, "-rpf", f"--rootdir={tmp_path}", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "2 failed, 1 passed" in found.stdout
    assert re.search("PASSED .*test_that_follows", found.stdout)
    assert "AssertionError: seen in rank one" in found.stdout
    assert "SIGKILL" in found.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_ranks_end_with_their_launch(tmp_path):
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    launch = torchrun(script, tmp_path, ranks=2, logs=tmp_path / "logs")
    assert launch.code == -signal.SIGKILL
    started = [int(path.stem) for path in tmp_path.glob("*.pid")]
    deadline = time.monotonic() + 10
    while running := [pid for pid in started if is_running(pid)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
