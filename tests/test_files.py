"""A file that is replaced is the old one or the new one, whatever happens while it is written."""

import signal
import subprocess
import sys

import pytest
import torch

import sketchoptim as so

_KILLED_WHILE_SAVING = """
import os, signal, sys, torch, sketchoptim as so
def half(content, file):
    file.write(b"half of it")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = half
so.save_checkpoint({"step": 2}, sys.argv[1])
"""


def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path):
    path = tmp_path / "checkpoint.pt"
    so.save_checkpoint({"step": 1}, path)
    killed = subprocess.run([sys.executable, "-c", _KILLED_WHILE_SAVING, str(path)])
    assert killed.returncode == -signal.SIGKILL
    assert torch.load(path) == {"step": 1}
    so.save_checkpoint({"step": 3}, path)
    assert torch.load(path) == {"step": 3}
    assert [it.name for it in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_an_error_while_saving_leaves_the_checkpoint_before(tmp_path):
    path = tmp_path / "checkpoint.pt"
    so.save_checkpoint({"step": 1}, path)
    with pytest.raises(AttributeError, match="local object"):
        so.save_checkpoint({"step": 2, "function": lambda: None}, path)
    assert torch.load(path) == {"step": 1}


def test_a_symbolic_link_to_a_checkpoint_stays_one(tmp_path):
    target, link = tmp_path / "run-7.pt", tmp_path / "latest.pt"
    link.symlink_to(target)
    so.save_checkpoint({"step": 1}, link)
    assert link.is_symlink()
    assert torch.load(target) == {"step": 1}
