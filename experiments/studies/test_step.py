"""One optimizer step under pytest-benchmark, to compare two versions of the code.

    pytest experiments/studies/test_step.py --benchmark-autosave
    pytest experiments/studies/test_step.py --benchmark-compare

`make test` does not run it. `experiments bench` compares methods with each other and lets them take
turns; here each runs by itself, so compare a method with its own past only.
"""

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import nn

from ..bench.cases import LM1B_SMALL, WIKITEXT2, WIKITEXT103, Case, Settings, default_counts
from ..bench.gradients import WordFrequencies
from ..bench.measure import CacheFlusher, threads
from ..bench.methods import BY_NAME, absence_reasons

CASES = (WIKITEXT2, WIKITEXT103, LM1B_SMALL)
ROUNDS = 20


@pytest.fixture(scope="module")
def frequencies() -> WordFrequencies:
    path, rows = default_counts(), max(case.rows for case in CASES)
    if path is None or not path.exists():
        return WordFrequencies.zipf(rows=rows)
    return WordFrequencies.from_file(path, rows=rows)


@pytest.fixture(scope="module")
def flusher() -> CacheFlusher:
    return CacheFlusher()


@pytest.fixture(scope="module", params=CASES, ids=str)
def table(request: pytest.FixtureRequest) -> tuple[Case, nn.Parameter]:
    """A case with the parameter that all methods share."""
    case = request.param
    return case, nn.Parameter(torch.empty(case.rows, case.dim).uniform_(-0.1, 0.1))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1), torch.sparse.check_sparse_tensor_invariants(False):
        yield


@pytest.mark.parametrize("kind", ["coalesced", "raw"])
@pytest.mark.parametrize("name", BY_NAME)
def test_step(
    benchmark: Any,
    table: tuple[Case, nn.Parameter],
    name: str,
    kind: Literal["coalesced", "raw"],
    frequencies: WordFrequencies,
    flusher: CacheFlusher,
) -> None:
    case, parameter = table
    rival = BY_NAME[name]
    for missing, reason in absence_reasons((rival,)).items():
        pytest.skip(f"{missing} is {reason}")
    if kind == "coalesced":
        batch = frequencies.coalesced(case.rows, case.dim, case.touched, seed=0)
    else:
        batch = frequencies.raw(case.rows, case.dim, Settings.tokens, seed=0)
    method = rival.build(parameter, rival.memory)

    def prepare() -> None:
        method.prepare(batch)
        flusher.flush_()

    benchmark.group = f"{case.rows} x {case.dim}, {batch.entries} {kind} rows"
    benchmark.extra_info["ids"] = frequencies.source
    benchmark.pedantic(method.step, setup=prepare, rounds=ROUNDS, warmup_rounds=1)
