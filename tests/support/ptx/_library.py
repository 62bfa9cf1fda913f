"""`machine.c`, compiled once, and the structures that it shares with Python."""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_name("machine.c")
_FOLDER = Path(__file__).parents[3] / "build" / "ptx"
_COMPILE = ("gcc", "-O3", "-march=native", "-ffp-contract=off", "-std=gnu11", "-shared", "-fPIC")


class Instruction(ctypes.Structure):
    _fields_ = (
        ("operation", ctypes.c_int32),
        ("guard", ctypes.c_int32),
        ("negated", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("bytes", ctypes.c_int32),
        ("target", ctypes.c_int32),
        ("base", ctypes.c_int32),
        ("line", ctypes.c_int32),
        ("destination", ctypes.c_int32 * 4),
        ("source", ctypes.c_int32 * 4),
        ("offset", ctypes.c_int64),
    )


class Range(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("element", ctypes.c_uint64),
    )


class Job(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.POINTER(Instruction)),
        ("length", ctypes.c_int32),
        ("registers", ctypes.c_int32),
        ("fixed", ctypes.c_int32),
        ("values", ctypes.POINTER(ctypes.c_uint64)),
        ("warps", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("ranges", ctypes.POINTER(Range)),
        ("range_count", ctypes.c_int32),
        ("finds_races", ctypes.c_int32),
        ("grid", ctypes.c_uint32 * 3),
        ("first_program", ctypes.c_uint64),
        ("programs", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("resident", ctypes.c_int32),
    )


class Result(ctypes.Structure):
    _fields_ = (
        ("fault", ctypes.c_int64),
        ("address", ctypes.c_int64),
        ("line", ctypes.c_int64),
        ("other_line", ctypes.c_int64),
        ("instructions", ctypes.c_uint64),
        ("loads", ctypes.c_uint64),
        ("stores", ctypes.c_uint64),
        ("sectors", ctypes.c_uint64),
        ("atomics", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("longest_warp", ctypes.c_uint64),
        ("longest_loads", ctypes.c_uint64),
        ("longest_program", ctypes.c_uint64),
    )


def _load() -> ctypes.CDLL:
    source = _SOURCE.read_bytes()
    path = _FOLDER / f"machine-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if not path.exists():
        _FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
            built = Path(folder) / path.name
            subprocess.run([*_COMPILE, "-o", built, _SOURCE, "-lm"], check=True)
            os.replace(built, path)  # several processes may build it at once
    library = ctypes.CDLL(str(path))
    library.operation_number.argtypes = [ctypes.c_char_p]
    library.run.argtypes = [ctypes.POINTER(Job), ctypes.c_uint64, ctypes.POINTER(Result)]
    return library


_library = _load()
operation_number = _library.operation_number
run = _library.run
