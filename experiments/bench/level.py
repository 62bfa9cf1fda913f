"""The SIMD level of a run. Torch and FBGEMM read it from the environment when they are loaded."""

import os
import sys
from collections.abc import Mapping

from sketchoptim.ops import _native

_LEVELS = ("v4", "v3", "base")  # a machine has its own and all that follow
_TORCH = "ATEN_CPU_CAPABILITY"
# FBGEMM chooses among the kinds of AVX-512 itself, and has no level below AVX2. oneDNN, which
# multiplies for torch, reads a variable of its own.
_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "v4": {_TORCH: "avx512"},
    "v3": {
        _TORCH: "avx2",
        "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "base": {
        _TORCH: "default",
        "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
}


def run_at(level: str) -> None:
    """Returns if this process runs at the level; else starts the same command at that level.

    The new command takes the place of this process, so the function does not return then.
    """
    if level not in _LEVELS:
        raise ValueError(f"level must be one of {', '.join(_LEVELS)}, got {level!r}")
    current = _native.level()
    wanted = _VARIABLES[level]
    if all(os.environ.get(name) == value for name, value in wanted.items()) and level == current:
        return
    if _TORCH in os.environ:
        raise ValueError(
            f"{_TORCH} must not be set together with --level, got {os.environ[_TORCH]!r}; unset it"
        )
    own = _LEVELS[_LEVELS.index(current) :]
    if level not in own:
        raise ValueError(
            f"level must be one that this machine has, {' or '.join(own)}, got {level!r}"
        )
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})
