"""Starts one rank: `python rank_worker.py <seconds> <script> ...` runs the script for so long.

The rank ends by itself when its time is over, printing where it was, and when its parent ends.
"""

import ctypes
import faulthandler
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def end_with_parent() -> None:
    """Lets this process be killed when the one that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent()
    _, seconds, script, *_ = sys.argv
    faulthandler.dump_traceback_later(float(seconds), exit=True)
    del sys.argv[:2]
    runpy.run_path(script, run_name="__main__")
    faulthandler.cancel_dump_traceback_later()
