"""A program: what our constructors do with the error inputs of torch's own tests of optimizers.

Prints one line of JSON for each input: the optimizer, what the input is, its options that ours
does not have, the error that torch raises, and what ours raised. It runs in a process of its own,
since importing torch's tests changes settings of torch and of hypothesis.
"""

import inspect
import json
import sys
import types
import unittest
import warnings

# torch's tests import a package that is no part of torch; of it they need this class alone here.
stub = types.ModuleType("expecttest")
stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
sys.modules.setdefault("expecttest", stub)

import torch  # noqa: E402
from torch.testing._internal.common_optimizers import (  # noqa: E402
    OptimizerErrorEnum,
    optim_db,
)

import sketchoptim as so  # noqa: E402

OURS = {"Adam": so.Adam, "AdamW": so.AdamW, "RMSprop": so.RMSprop, "Adagrad": so.Adagrad}
OURS["SGD"] = so.SGD


def raised_by(kind, params, options) -> str:
    if params is None:
        params = [torch.nn.Parameter(torch.randn(2, 3))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            kind(params, **options)
        except Exception as error:  # whatever it is, it is to be reported
            return type(error).__name__
    return "nothing"


def main() -> None:
    for info in optim_db:
        name = info.optim_cls.__name__
        if name not in OURS:
            continue
        known = {*inspect.signature(OURS[name]).parameters}
        for case in info.optim_error_inputs_func("cpu", torch.float32):
            assert case.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
            given = case.optimizer_error_input
            lacking = sorted({*given.kwargs} - known)
            row = {
                "optimizer": name,
                "input": given.desc,
                "lacking": lacking,
                "theirs": case.error_type.__name__,
                "ours": None if lacking else raised_by(OURS[name], given.params, given.kwargs),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
