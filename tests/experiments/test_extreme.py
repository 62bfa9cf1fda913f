"""Extreme classification in small: benchmarks/debian_contents.py has the full one."""

import lzma
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sketchoptim.experiments.extreme import (
    MEMORIES,
    Settings,
    Task,
    build,
    read_task,
    recalls,
    table_names,
    train,
)
from sketchoptim.nn import FeatureHashing

DATA = Path(os.environ.get("SKETCHOPTIM_DATA", Path(__file__).parents[3] / "shared" / "data"))
FOLDER = DATA / "debian-contents"

needs_data = pytest.mark.skipif(
    not FOLDER.is_dir(),
    reason=f"Debian's contents are not at {FOLDER}; set SKETCHOPTIM_DATA to their parent folder",
)

HASHING = FeatureHashing(features=500)
TINY = Settings(table_lr=0.05, steps=100, batch=16, features=500, dim=16, members=3, buckets=8)


def write(folder: Path, name: str, lines: list[str]) -> None:
    with lzma.open(folder / f"{name}.tsv.xz", "wt", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


@pytest.fixture
def task(tmp_path) -> Task:
    """Forty packages, of which package 0 has the most paths, and one that only the test has."""
    lines = [f"usr/lib/package{n}/file{m}\tpackage{n}" for m in range(6) for n in range(40)]
    write(tmp_path, "train", [*lines, *["etc/zero\tpackage0"] * 9])
    write(tmp_path, "test", ["usr/lib/package7/other\tpackage7", "never/seen\tunknown"])
    return read_task(tmp_path, HASHING, valid=20)


def test_the_parts_are_those_of_the_files(task):
    assert task.classes == 40
    assert (len(task.train), len(task.valid), len(task.test)) == (229, 20, 1)
    assert task.train.labels[0] == 0  # package0, the most frequent
    first = HASHING(["usr/lib/package0/file0"])
    assert torch.equal(task.train.take(torch.tensor([0])).bags.ids, first.ids.int())


def test_only_the_rows_asked_for_are_read(task, tmp_path):
    few = read_task(tmp_path, HASHING, rows=30, valid=5)
    assert (few.classes, len(few.train), len(few.valid), len(few.test)) == (30, 25, 5, 1)
    with pytest.raises(ValueError, match="rows must be above valid = 5, got 5"):
        read_task(tmp_path, HASHING, rows=5, valid=5)


@pytest.mark.parametrize("output", ["mach", "sampled", "lsh"])
@pytest.mark.parametrize("method", list(MEMORIES))
def test_every_output_learns_under_every_memory(task, output, method):
    settings = replace(TINY, output=output, method=method, samples=20, bits=4, active=8)
    run = train(task, settings)
    assert run.loss < 0.85 * train(task, replace(settings, steps=1)).loss
    assert 0 < run.table_state_bytes < run.state_bytes


def test_a_run_is_the_same_every_time(task):
    for output in ("mach", "sampled", "lsh"):
        settings = replace(TINY, output=output, steps=3, samples=20, bits=4, active=8)
        assert train(task, settings).loss == train(task, settings).loss


@pytest.mark.parametrize("output", ["mach", "sampled", "lsh"])
def test_the_tables_are_the_parameters_with_sparse_gradients(task, output):
    model = build(task.classes, replace(TINY, output=output, samples=20, bits=4, active=8))
    model(task.valid.bags, task.valid.labels).backward()
    sparse = {name for name, p in model.named_parameters() if p.grad.is_sparse}
    assert sparse == table_names(model)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"output": "softmax"}, "output must be in"),
        ({"method": "adam"}, "method must be in"),
        ({"table_lr": 0.0}, "table_lr must be finite and > 0"),
        ({"body_lr": math.nan}, "body_lr must be finite and > 0"),
        ({"steps": 0}, "steps must be >= 1"),
        ({"batch": 0}, "batch must be >= 1"),
    ],
)
def test_bad_settings_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        replace(TINY, **options)


@needs_data
def test_mach_finds_the_packages_of_debians_files():
    task = read_task(FOLDER, FeatureHashing(), rows=60_000, valid=2_000)
    assert len(task.test) > 15_000
    settings = Settings(table_lr=0.05, steps=60, batch=256, dim=64, members=3, buckets=512)
    exact, lean = (train(task, replace(settings, method=method)) for method in ("exact", "lean"))
    assert lean.table_state_bytes < exact.table_state_bytes / 500
    at_10 = [recalls(run.model, task.valid, [10], aggregation="logits")[0] for run in (exact, lean)]
    assert min(at_10) > 0.35
    assert at_10[1] > at_10[0] - 0.05
