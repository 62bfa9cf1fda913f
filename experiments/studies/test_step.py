"""One optimizer step under pytest-benchmark, to compare two versions of the code.

    pytest benchmarks/test_step.py --benchmark-autosave
    pytest benchmarks/test_step.py --benchmark-compare

Not among the tests that `make test` runs. `sketchoptim bench` compares the methods with each other
and interleaves them; here each runs by itself, so compare a method with its own past only.
"""

import pytest
import torch
from torch import nn

from ..bench.cases import (
    LM1B_SMALL,
    WIKITEXT2,
    WIKITEXT103,
    Settings,
    default_counts,
)
from ..bench.gradients import WordFrequencies
from ..bench.measure import CacheFlusher, threads
from ..bench.methods import BY_NAME, absent

CASES = (WIKITEXT2, WIKITEXT103, LM1B_SMALL)
ROUNDS = 20


@pytest.fixture(scope="module")
def law():
    path, rows = default_counts(), max(case.rows for case in CASES)
    return (
        WordFrequencies.from_file(path, rows=rows)
        if path.exists()
        else WordFrequencies.zipf(rows=rows)
    )


@pytest.fixture(scope="module")
def flusher():
    return CacheFlusher()


@pytest.fixture(scope="module", params=CASES, ids=str)
def table(request):
    """A case with the parameter that all methods share."""
    case = request.param
    return case, nn.Parameter(torch.empty(case.rows, case.dim).uniform_(-0.1, 0.1))


@pytest.fixture(autouse=True)
def one_thread():
    with threads(1), torch.sparse.check_sparse_tensor_invariants(False):
        yield


@pytest.mark.parametrize("kind", ["coalesced", "raw"])
@pytest.mark.parametrize("name", BY_NAME)
def test_step(benchmark, table, name, kind, law, flusher):
    case, parameter = table
    rival = BY_NAME[name]
    for missing, reason in absent((rival,)).items():
        pytest.skip(f"{missing} is {reason}")
    if kind == "coalesced":
        batch = law.coalesced(case.rows, case.dim, case.touched, seed=0)
    else:
        batch = law.raw(case.rows, case.dim, Settings.tokens, seed=0)
    method = rival.build(parameter, rival.memory)

    def prepare():
        method.prepare(batch)
        flusher.flush_()

    benchmark.group = f"{case.rows} x {case.dim}, {batch.entries} {kind} rows"
    benchmark.extra_info["ids"] = law.source
    benchmark.pedantic(method.step, setup=prepare, rounds=ROUNDS, warmup_rounds=1)
