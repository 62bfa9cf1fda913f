"""A step happens or does not, whatever interrupts it."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"


def lines_of(program: str, *arguments: str) -> list[str]:
    """What a program of tests/support prints."""
    command = [sys.executable, "-W", "ignore", str(SUPPORT / program), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("kind", ["kernels", "reference"])
def test_a_step_that_a_signal_interrupts_is_whole_or_not_begun(kind):
    outcomes = Counter(lines_of("interrupted_steps.py", kind))
    assert set(outcomes) == {"whole", "not begun"}, outcomes


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_step_without_memory_for_all_of_it_moves_nothing():
    assert lines_of("steps_without_memory.py") == ["refused: nothing moved", "taken: all moved"]
