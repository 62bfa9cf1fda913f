"""The C++ library: finding it, loading it, and its structs; csrc/abi.h is the other side."""

import ctypes
import functools
import os
from array import array
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

import torch

from .._warning import warn

_ABI = 19
# A 64-bit word of a struct, in an array: "L" is the faster one to fill if it has 64 bits.
WORD = "L" if array("L").itemsize == 8 else "Q"
# Below this many elements, threads cost more than they save.
ELEMENTS_FOR_THREADS = 1 << 15
# From torch's name of what the machine can do to our name of what a library was built for.
_LEVELS = {"AVX512": "v4", "AVX2": "v3"}


class Moment(ctypes.Structure):
    _fields_ = [
        ("kind", c_int32),
        ("form", c_int32),
        ("dtype", c_int32),
        ("is_signed", c_int32),
        ("is_by_row", c_int32),
        ("is_average", c_int32),
        ("depth", c_int32),
        ("weight", c_float),
        ("decay_less_one", c_float),
        ("scale", c_float),
        ("inverse_scale", c_float),
        ("rounding_key", c_uint32),
        ("width", c_int64),
        ("data", c_void_p),
        ("words", c_void_p),
        ("stored_scale", c_void_p),
        ("stored_start", c_void_p),
        ("writes", c_void_p),
    ]


class Gradient(ctypes.Structure):
    _fields_ = [
        ("values", c_void_p),
        ("ids", c_void_p),
        ("starts", c_void_p),
        ("order", c_void_p),
        ("slots", c_void_p),
        ("sums", c_void_p),
        ("factors", c_void_p),
        ("rows", c_int64),
        ("first_id", c_int64),
        ("stride", c_int64),
        ("scale", c_float),
        ("is_of_lookups", c_int32),
        ("dtype", c_int32),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        ("parameter", c_void_p),
        ("n", c_int64),
        ("step_count", c_void_p),
        ("dim", c_int64),
        ("dtype", c_int32),
        ("threads", c_int32),
        ("gradient", Gradient),
        ("first", Moment),
        ("second", Moment),
        ("row_values", c_void_p),
        ("columns", c_void_p),
        ("column_roots", c_void_p),
        ("column_inverses", c_void_p),
        ("column_shares", c_void_p),
        ("share_step", c_uint64),
        ("workspace", c_void_p),
        ("step_size", c_float),
        ("second_root", c_float),
        ("eps", c_float),
        ("weight_decay", c_float),
        ("shrink", c_float),
        ("nesterov", c_float),
        ("clip", c_float),
        ("largest_gradient", c_float),
        ("is_maximizing", c_int32),
        ("has_nesterov", c_int32),
        ("has_clip", c_int32),
        ("is_ratio", c_int32),
        ("is_inspected", c_int32),
        ("is_stochastic", c_int32),
        ("rounding_key", c_uint32),
        ("first_row", c_int64),
        ("piece_rows", c_int64),
        ("most_row_values", c_int64),
        ("finding", c_int32),
        ("leaves_shares", c_int32),
        ("shared", c_int64),
    ]


class Call(ctypes.Structure):
    _fields_ = [
        ("step", c_void_p),
        ("rule", c_void_p),
        ("values", c_void_p),
        ("ids", c_void_p),
        ("entries", c_int64),
        ("lookups", c_void_p),
        ("table", c_int64),
        ("scale", c_double),
        ("is_checked", c_int64),
        ("rounding_key", c_uint64),
    ]


class Lookups(ctypes.Structure):
    _fields_ = [
        ("ids", c_void_p),
        ("offsets", c_void_p),
        ("weights", c_void_p),
        ("values", c_void_p),
        ("count", c_int64),
        ("tables", c_int64),
        ("outputs", c_int64),
        ("columns", c_int64),
        ("stride", c_int64),
        ("is_mean", c_int32),
        ("is_single", c_int32),
        ("largest", c_float),
    ]


class Calls(ctypes.Structure):
    _fields_ = [
        ("call", c_void_p),
        ("count", c_int64),
        ("threads", c_int32),
        ("elements_for_threads", c_int64),
    ]


class TopClasses(ctypes.Structure):
    _fields_ = [
        ("tables", c_void_p),
        ("words", c_void_p),
        ("ids", c_void_p),
        ("count", c_int64),
        ("buckets", c_int64),
        ("k", c_int64),
        ("members", c_int32),
        ("queries", c_int32),
        ("combination", c_int32),
        ("threads", c_int32),
        ("scores", c_void_p),
        ("classes", c_void_p),
    ]


class BagTable(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("rows", c_int64),
        ("dim", c_int64),
        ("column", c_int64),
    ]


class Bags(ctypes.Structure):
    _fields_ = [
        ("table", c_void_p),
        ("lookups", c_void_p),
        ("output", c_void_p),
        ("dtype", c_int32),
        ("threads", c_int32),
    ]


class LogitBlock(ctypes.Structure):
    _fields_ = [
        ("values", c_void_p),
        ("bias", c_void_p),
        ("target", c_void_p),
        ("tokens", c_int64),
        ("classes", c_int64),
        ("first_class", c_int64),
        ("dtype", c_int32),
        ("threads", c_int32),
        ("softcap", c_float),
        ("highest", c_void_p),
        ("total", c_void_p),
        ("sum", c_void_p),
        ("chosen", c_void_p),
        ("product", c_void_p),
        ("dim", c_int64),
        ("logsumexp", c_void_p),
        ("coefficient", c_void_p),
        ("target_share", c_float),
        ("class_share", c_float),
    ]


def level() -> str:
    """The SIMD level of this machine: "v4", "v3" or "base"."""
    return _LEVELS.get(torch.backends.cpu.get_cpu_capability(), "base")


def load(name: str) -> ctypes.CDLL:
    """The library built for a level, with the types of its functions declared.

    torch has been imported by now, so that the one OpenMP runtime it brought serves both.
    """
    library = ctypes.CDLL(str(_path(name)))
    if library.sketchoptim_abi() != _ABI:
        raise OSError(f"{library._name} is of another version of sketchoptim; install it again")
    pointer = c_void_p
    library.sketchoptim_add_logits.argtypes = [POINTER(LogitBlock)]
    library.sketchoptim_add_logits.restype = None
    library.sketchoptim_ascend.argtypes = [pointer, c_int64, c_int64]
    library.sketchoptim_ascend.restype = c_int32
    library.sketchoptim_differentiate_logits.argtypes = [POINTER(LogitBlock)]
    library.sketchoptim_differentiate_logits.restype = None
    for name in ("check_ids", "run"):
        getattr(library, f"sketchoptim_{name}").argtypes = [POINTER(Calls)]
    for name in ("group_ids", "check_values"):
        getattr(library, f"sketchoptim_{name}").argtypes = [POINTER(Calls), pointer]
    for name in ("check_ids", "group_ids", "check_values"):
        getattr(library, f"sketchoptim_{name}").restype = c_int64
    library.sketchoptim_run.restype = None
    step = POINTER(Step)
    library.sketchoptim_workspace.argtypes = [step]
    library.sketchoptim_workspace.restype = c_int64
    library.sketchoptim_takes_rows.argtypes = [step]
    library.sketchoptim_takes_rows.restype = c_int32
    library.sketchoptim_begin_rows.argtypes = [POINTER(Call), pointer]
    library.sketchoptim_begin_rows.restype = None
    library.sketchoptim_move_rows.argtypes = [step, pointer, c_int32, c_int64, c_int64, c_int32]
    library.sketchoptim_move_rows.restype = None
    library.sketchoptim_end_rows.argtypes = [POINTER(Call)]
    library.sketchoptim_end_rows.restype = None
    library.sketchoptim_group.argtypes = [*[pointer] * 2, c_int64, pointer, POINTER(Gradient)]
    library.sketchoptim_group.restype = c_int64
    library.sketchoptim_hash.argtypes = [
        pointer,
        c_int32,
        c_int64,
        pointer,
        c_int64,
        *[pointer] * 2,
    ]
    library.sketchoptim_hash.restype = None
    library.sketchoptim_noise.argtypes = [c_uint32, pointer, c_int64, c_int64, pointer]
    library.sketchoptim_noise.restype = None
    library.sketchoptim_pool_bags.argtypes = [POINTER(Bags)]
    library.sketchoptim_pool_bags.restype = c_int64
    library.sketchoptim_top_classes.argtypes = [POINTER(TopClasses)]
    library.sketchoptim_top_classes.restype = c_int32
    return library


def description() -> str:
    """A description of the kernels that step parameters on the CPU."""
    try:
        loaded = load(level())
    except OSError as error:
        return f"reference kernels, many times slower: {error}"
    return f"native kernels, level {level()}: {loaded._name}"


def _path(name: str) -> Path:
    # An editable installation keeps what was built apart from the sources: both are on the path.
    import sketchoptim.ops

    paths = [Path(folder) / f"libsketchoptim_{name}.so" for folder in sketchoptim.ops.__path__]
    found = [path for path in paths if path.exists()]
    if not found:
        raise OSError(
            f"{paths[0].name} was not built; install sketchoptim where a C++ compiler is found"
        )
    return found[0]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library for this machine, or None, with one warning, where there is none.

    ``SKETCHOPTIM_REQUIRE_NATIVE=1`` makes its absence an error instead.
    """
    try:
        return load(level())
    except OSError as error:
        if os.environ.get("SKETCHOPTIM_REQUIRE_NATIVE") == "1":
            raise ImportError(
                f"SKETCHOPTIM_REQUIRE_NATIVE=1, but the native kernels do not load: {error}"
            ) from error
        warn(f"sketchoptim runs on its reference kernels, which are many times slower: {error}")
        return None
