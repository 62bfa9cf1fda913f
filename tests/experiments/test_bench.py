import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from experiments import machine
from experiments.bench import fbgemm, heads, level, measure, methods, training
from experiments.bench.cases import (
    PARTS,
    BagsShape,
    Case,
    DenseShape,
    HeadShape,
    Point,
    Settings,
    Sweep,
    TablesShape,
    TrainingShape,
)
from experiments.bench.gradients import WordFrequencies
from experiments.bench.measure import Entrant, measure_in_turn
from experiments.bench.methods import BY_NAME, RIVALS
from experiments.bench.session import run_bench
from experiments.bench.updates import DENSE_METHODS
from experiments.commands import build_app
from sketchoptim.ops import cpu

OURS = ("lean", "row-wise", "exact", "paper-v-only", "paper-mv", "paper-mv-bf16", "linear-mv")
TINY = Settings(
    cases=(Case(rows=300, dim=8, touched=20), Case(rows=300, dim=8, touched=5)),
    tokens=50,
    sweeps=(
        Sweep(
            axis="rows",
            values=(100, 200),
            base=Point(rows=100, dim=4, touched=10),
            methods=("sparse-adam", "lean"),
        ),
        Sweep(
            axis="threads",
            values=(1, 2, 1_000_000),
            base=Point(rows=100, dim=4, touched=10),
            methods=("lean",),
        ),
        Sweep(
            axis="depth",
            values=(1, 2),
            base=Point(rows=100, dim=4, touched=10),
            methods=("fbgemm",),
        ),
    ),
    training=(TrainingShape(rows=300, dim=8, tokens=40, samples=16),),
    tables=(TablesShape(rows=(300, 1, 7), dim=8, batch=20),),
    counts=(1, 2),
    dense=(DenseShape(rows=50, dim=8, dtype="bfloat16"),),
    bags=(
        BagsShape(
            tables=TablesShape(
                rows=(300, 7),
                dim=8,
                batch=20,
            ),
            ids_a_bag=3,
        ),
    ),
    heads=(HeadShape(rows=300, dim=8, tokens=20, dtype="float32"),),
    parts=PARTS,
    seconds=0.0,
    least=2,
    batches=2,
    cores=2,
)


def no_fbgemm():
    raise ModuleNotFoundError("No module named 'fbgemm_gpu'", name="fbgemm_gpu")


@pytest.fixture(autouse=True, scope="module")
def small_caches():
    """Caches that are flushed at once: real ones, hundreds of times, take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 16)
        yield


@pytest.fixture
def frequencies():
    return WordFrequencies(np.array([8.0, 4.0, 2.0, 1.0, 1.0]), source="five words")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run on tiny tables: its report, what it printed and its folder."""
    folder = tmp_path_factory.mktemp("bench")
    np.save(folder / "counts.npy", 1000 // np.arange(1, 301, dtype=np.int32) + 1)
    console = Console(record=True, width=150, file=io.StringIO())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fbgemm, "_modules", no_fbgemm)
        patch.setattr(heads, "peak_bytes", lambda *_: 1 << 20)  # by processes of their own
        report = run_bench(
            TINY, counts=folder / "counts.npy", output=folder / "results", console=console
        )
    return report, console.export_text(), folder / "results"


def test_a_run_prints_every_method_and_writes_json(finished):
    report, printed, folder = finished
    for rival in RIVALS:
        assert rival.title in printed
    assert "absent" in printed
    kept = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    assert kept == json.loads(json.dumps(report.as_dict()))


def test_the_json_holds_medians_quartiles_ratios_and_what_they_depend_on(finished):
    _, _, folder = finished
    kept = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    assert kept["versions"]["torch"] == torch.__version__
    assert kept["machine"]["cores"] >= 1
    assert kept["ids"] == "counts.npy"
    assert kept["absent"] == {"fbgemm": "not installed"}
    assert [(c["kind"], c["entries"]) for c in kept["steps"]] == [
        ("coalesced", 5),
        ("coalesced", 20),
        ("raw", 50),
    ]
    for comparison in kept["steps"]:
        assert comparison["row_bandwidth"] > 0
        assert comparison["streaming_bandwidth"] > 0
        rows = {row["method"]: row for row in comparison["results"]}
        assert set(rows) == set(BY_NAME) - {"fbgemm"}
        baseline = rows["sparse-adam"]["timing"]
        for row in rows.values():
            timing = row["timing"]
            assert timing["lower_quartile"] <= timing["median"] <= timing["upper_quartile"]
            assert timing["repetitions"] >= 2
            ratio = timing["median"] / baseline["median"]
            assert row["ratio_to_sparse_adam"] == pytest.approx(ratio)


def test_sweeps_leave_out_what_the_machine_or_the_choice_of_methods_does_not_have(finished):
    report, _, _ = finished
    assert [(sweep.axis, sweep.values) for sweep in report.scaling] == [
        ("rows", (100, 200)),
        ("threads", (1, 2)),
    ]
    assert set(report.scaling[0].timings) == {"sparse-adam", "lean"}


def test_a_head_is_timed_and_its_gradient_counted(finished):
    report, printed, _ = finished
    (results,) = report.heads
    assert [it.method for it in results] == list(heads.METHODS)
    plain, *_, fused = results
    assert plain.ratio == 1.0
    assert fused.bytes_a_weight < plain.bytes_a_weight
    assert "head of 300 x 8 float32, 20 tokens" in printed


def test_steps_over_small_tables_and_along_dense_gradients_are_timed(finished):
    report, printed, _ = finished
    assert [it.title for it in report.many] == [
        "1 table of 1,000 x 16, sparse gradients of 8 rows",
        "1 table of 16 x 16, dense gradients",
        "2 tables of 1,000 x 16, sparse gradients of 8 rows",
        "2 tables of 16 x 16, dense gradients",
    ]
    assert list(report.many[0].timings)[:2] == ["torch SparseAdam", "so.Adam, lean"]
    usual = [method.title for method in DENSE_METHODS.values() if method.is_usual]
    for times in (report.many[1], *report.dense):
        assert list(times.timings) == usual
    for times in (*report.many, *report.dense):
        assert times.title in printed
        assert all(timing.least > 0 for timing in times.timings.values())


def test_whole_steps_of_bags_are_timed_with_and_without_a_network_on_one_thread_and_two(finished):
    report, printed, _ = finished
    assert [(it[0].threads, it[0].has_network) for it in report.bags] == [
        (1, True),
        (1, False),
        (2, True),
        (2, False),
    ]
    for results in report.bags:
        assert [it.method for it in results] == ["sparse", "armed", "bags", "bags-plain"]
        assert results[0].ratios == {"sparse": 1.0}
    assert "bags of 3, with a small network\n" in printed
    assert "2 threads, wall time" in printed


def test_extra_memory_is_that_of_the_task():
    kept = torch.zeros(1 << 20)
    extra = machine.extra_memory_bytes(lambda: torch.zeros(1 << 24).add_(1))
    assert abs(extra - (1 << 26)) < 1 << 22  # Linux counts pages in batches
    assert not kept.any()


def test_a_training_step_is_split_into_its_parts(finished):
    report, _, _ = finished
    (results,) = report.training
    assert [result.method for result in results] == ["sparse-adam", "exact", "lean"]
    for result in results:
        parts = result.forward.least + result.backward.least + result.optimizer.least
        assert 0 < parts <= result.total.least


def test_many_tables_are_trained_apart_and_as_one(finished):
    report, _, _ = finished
    (results,) = report.tables
    names = ["sparse-adam", "sparse-sgd", "sgd", "lean", "lean-unchecked"]
    names += ["lean-joint", "lean-unchecked-joint"]
    assert [result.method for result in results] == names


@pytest.mark.parametrize("kind", ["separate", "joint", "fbgemm"])
def test_every_form_of_the_tables_returns_their_rows_in_order(kind):
    shape = TablesShape(rows=(5, 3), dim=4, batch=6)
    ids = [torch.tensor([4, 0, 1, 1, 3, 2]), torch.tensor([0, 2, 2, 1, 0, 1])]
    if kind == "separate":
        bags = [nn.EmbeddingBag(rows, 4, mode="sum", sparse=True) for rows in shape.rows]
        lookup, weights = training._Separate(bags, 6), [bag.weight for bag in bags]
    elif kind == "joint":
        lookup = training._Joint(shape)
        weights = lookup.table.weight.split(shape.rows)
    else:
        if reason := fbgemm.absence_reason():
            pytest.skip(f"FBGEMM is {reason}")
        lookup = training._Fbgemm(shape)
        weights = lookup.tables.split_embedding_weights()
        for weight in weights:
            weight.normal_()
    expected = torch.cat([weight[one] for weight, one in zip(weights, ids, strict=True)], 1)
    assert torch.equal(torch.cat(lookup(ids), 1), expected)


def test_missing_counts_are_replaced_by_zipfs_law_loudly(tmp_path, monkeypatch):
    monkeypatch.setenv("SKETCHOPTIM_DATA", str(tmp_path / "nowhere"))
    console = Console(record=True, width=200, file=io.StringIO())
    nothing = Settings(parts=(), methods=("lean",))
    report = run_bench(nothing, output=tmp_path, console=console)
    printed = console.export_text()
    assert "ids follow Zipf's law instead; name them with --counts, or set SKETCHOPTIM" in printed
    assert report.ids == "Zipf's law, NOT the counts of LM1B"


# -- gradients -------------------------------------------------------------------------------


def test_a_raw_gradient_is_what_an_embedding_leaves(frequencies):
    batch = frequencies.raw(5, 3, 40, seed=1)
    table = nn.Embedding(5, 3, sparse=True)
    table(batch.ids).backward(batch.values)
    expected = table.weight.grad
    assert not batch.gradient.is_coalesced()
    assert not expected.is_coalesced()
    assert torch.equal(batch.gradient._indices(), expected._indices())
    assert torch.equal(batch.gradient._values(), expected._values())
    assert batch.touched == expected.coalesce()._nnz()


def test_a_coalesced_gradient_has_distinct_ascending_rows(frequencies):
    batch = frequencies.coalesced(5, 3, 4, seed=1)
    assert batch.gradient.is_coalesced()
    assert batch.touched == batch.entries == 4
    assert (batch.ids.diff() > 0).all()


@pytest.mark.parametrize("rows", [5, 3])
def test_tokens_follow_the_counts_of_the_words_that_the_table_has(frequencies, rows):
    drawn = frequencies.tokens(rows, 20_000, np.random.default_rng(0))
    expected = frequencies.counts[:rows] / frequencies.counts[:rows].sum()
    shares = np.bincount(drawn.numpy(), minlength=rows) / 20_000
    assert np.abs(shares - expected).max() < 0.02


def test_too_few_counts_get_a_clear_error(tmp_path):
    np.save(tmp_path / "counts.npy", np.ones(10))
    with pytest.raises(ValueError, match="must hold at least 11 positive counts"):
        WordFrequencies.from_file(tmp_path / "counts.npy", rows=11)


# -- methods ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "fbgemm"])
def test_a_step_moves_the_touched_rows_and_no_others(name):
    frequencies = WordFrequencies.zipf(rows=200)
    parameter = nn.Parameter(torch.ones(200, 8))
    rival = BY_NAME[name]
    method = rival.build(parameter, rival.memory)
    batch = frequencies.coalesced(200, 8, 30, seed=0)
    method.prepare(batch)
    with torch.sparse.check_sparse_tensor_invariants(False):
        method.step()
    moved = (parameter != 1).any(1).nonzero().flatten()
    assert torch.equal(moved, batch.ids)


def test_the_sketch_in_torch_operations_uses_no_native_kernel(monkeypatch):
    calls = []
    monkeypatch.setattr(cpu.CpuKernels, "prepare", lambda *_, **__: calls.append("native"))
    rival = BY_NAME["torch-ops-lean"]
    parameter = nn.Parameter(torch.ones(50, 4))
    method = rival.build(parameter, rival.memory)
    method.prepare(WordFrequencies.zipf(rows=50).coalesced(50, 4, 3, seed=0))
    method.step()
    assert calls == []
    assert (parameter != 1).any()


@pytest.mark.parametrize("name", OURS)
def test_ideal_state_traffic_is_never_more_than_the_state_there_and_back(name):
    rival = BY_NAME[name]
    parameter = nn.Parameter(torch.ones(60, 8))
    method = rival.build(parameter, rival.memory)
    method.prepare(WordFrequencies.zipf(rows=60).coalesced(60, 8, 50, seed=0))
    method.step()
    sizes = {"rows": 60, "dim": 8, "entries": 50, "touched": 50}
    stateless = BY_NAME["sgd"].ideal_bytes(**sizes)
    state = rival.ideal_bytes(**sizes) - stateless
    assert 0 < state <= 2 * method.state_bytes()


def test_an_fbgemm_for_another_torch_is_reported_not_raised(monkeypatch):
    def broken():
        raise OSError("undefined symbol")

    monkeypatch.setattr(fbgemm, "_modules", broken)
    assert "another torch" in methods.absence_reasons(RIVALS)["fbgemm"]


# -- measuring -------------------------------------------------------------------------------


def test_repetitions_are_numbered_after_one_that_does_not_count():
    events = []
    entrant = Entrant(step=lambda: events.append("step"), prepare=events.append, threads=1, loops=2)
    timings = measure_in_turn({"a": entrant}, seconds=0.0, least=3, flusher=None)
    assert events == [0, "step", "step", 0, "step", "step", 1, "step", "step", 2, "step", "step"]
    assert timings["a"].repetitions == 3


# -- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "12x3"], "rows x dim x touched"),
        (["--case", "3x4x5"], "rows >= touched"),
        (["--method", "nobody"], "method must be one of"),
        (
            ["--only", "nothing"],
            "got 'nothing'; see --only",
        ),
        (["--clock", "sun"], "clock must be"),
        (["--clock", "cpu", "--threads", "2"], "one thread"),
        (["--threads", "0"], "--threads"),
        (["--counts", "no-such-file"], "--counts"),
    ],
)
def test_bad_options_of_the_benchmark_are_named(arguments, message):
    result = CliRunner().invoke(
        build_app(), ["bench", *arguments], env={"NO_COLOR": "1", "COLUMNS": "200"}
    )
    assert result.exit_code == 2
    assert message in re.sub(r"\s*│\n│\s*", " ", result.stderr)


def test_a_level_is_that_of_torch_and_of_our_kernels_in_the_new_process():
    program = (
        "from experiments.bench.level import run_at; run_at('base'); import torch; "
        "from sketchoptim.ops import _native; "
        "print(torch.backends.cpu.get_cpu_capability(), _native.level())"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], env=without_level(), capture_output=True, text=True
    )
    assert (result.stdout, result.stderr) == ("DEFAULT base\n", "")


@pytest.mark.parametrize(
    ("machine", "wanted", "variable", "message"),
    [
        ("v3", "v4", None, "one that this machine has, v3 or base, got 'v4'"),
        ("v4", "v5", None, "one of v4, v3, base, got 'v5'"),
        ("v4", "v3", "default", "ATEN_CPU_CAPABILITY must not be set .* got 'default'; unset it"),
    ],
)
def test_a_level_that_cannot_be_had_is_refused(monkeypatch, machine, wanted, variable, message):
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    if variable is not None:
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", variable)
    monkeypatch.setattr(level._native, "level", lambda: machine)
    with pytest.raises(ValueError, match=message):
        level.run_at(wanted)


def without_level():
    return {name: text for name, text in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
