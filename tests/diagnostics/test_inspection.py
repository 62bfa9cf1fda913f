"""What `inspect_checkpoint` finds in files that training wrote."""

import re

import pytest
import tiny_runs
import torch
from tiny_runs import PLANS, Run, batches

import sketchoptim as so
from sketchoptim.diagnostics._inspection import inspect_checkpoint


def saved(path, thing):
    torch.save(thing, path / "checkpoint.pt")
    return path / "checkpoint.pt"


@pytest.fixture(scope="module")
def lean():
    return Run.start(tiny_runs.PRESET_PLANS["lean-0.1"]).train(batches(3)).optimizer


@tiny_runs.each(PLANS)
def test_bytes_are_those_of_the_memory_report(plan, tmp_path):
    optimizer = Run.start(plan).train(batches(3)).optimizer
    found = inspect_checkpoint(saved(tmp_path, optimizer.state_dict()))
    assert found.state_bytes == so.memory_report(optimizer).state_bytes
    for moment in found.moments:
        assert moment.steps == 3
        is_sketch = moment.storage.startswith("by ")
        assert (moment.rows_per_bucket is not None) == is_sketch
        assert (moment.error is not None) == is_sketch
    assert f"{found.state_bytes:,}" in str(found).splitlines()[-1]


def test_a_sketch_says_its_load_and_its_error(lean, tmp_path):
    moment = inspect_checkpoint(saved(tmp_path, lean.state_dict())).moments[0]
    width = lean.state[lean.param_groups[0]["params"][0]]["second_counters"].shape[1]
    assert moment.storage == f"by row, 3 x {width}"
    assert moment.rows_per_bucket == tiny_runs.ROWS / width
    assert 0 < moment.filled <= 1
    assert moment.error.relative > 0


@pytest.mark.parametrize(
    ("wrap", "where"),
    [
        (lambda state: {"optimizer": state, "epoch": 3}, "optimizer"),
        (lambda state: {"optimizers": [state]}, "optimizers.0"),
        (lambda state: {"trainer": {"optimizer_states": [1, state]}}, "trainer.optimizer_states.1"),
    ],
)
def test_an_optimizer_is_found_inside_a_larger_checkpoint(wrap, where, lean, tmp_path):
    alone = inspect_checkpoint(saved(tmp_path, lean.state_dict()))
    found = inspect_checkpoint(saved(tmp_path, wrap(lean.state_dict())))
    assert {moment.where for moment in found.moments} == {where}
    assert found.state_bytes == alone.state_bytes
    assert str(found).startswith("optimizer  ")
    assert str(alone).startswith("parameter  ")


def test_a_folded_sketch_shows_its_width(tmp_path):
    table = torch.nn.Embedding(100, 4, sparse=True)
    folding = so.Sketched(width=8, fold_at=(1,), conservative=True)
    optimizer = so.Adam(table.parameters(), memory=so.Memory(second=folding))
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    found = inspect_checkpoint(saved(tmp_path, optimizer.state_dict()))
    assert found.moments[0].storage == "by row, 3 x 4"


def test_what_a_sum_starts_from_is_no_error(tmp_path):
    table = torch.nn.Embedding(100, 4, sparse=True)
    optimizer = so.Adagrad(table.parameters(), initial_accumulator_value=0.5, memory="lean-0.1")
    table(torch.tensor([1])).sum().mul(0.0).backward()
    optimizer.step()
    found = inspect_checkpoint(saved(tmp_path, optimizer.state_dict()))
    assert found.moments[0].error.absolute == 0


@pytest.mark.parametrize(
    "thing",
    [
        {"model": {"weight": torch.ones(3)}},
        [1, 2],
        torch.ones(2),
        {"state": {}, "param_groups": []},
    ],
)
def test_a_file_without_our_optimizers_is_refused(thing, tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint.pt must hold the state_dict\(\)"):
        inspect_checkpoint(saved(tmp_path, thing))


def test_a_checkpoint_of_torch_optim_is_refused(tmp_path):
    state = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict()
    with pytest.raises(ValueError, match="an optimizer of sketchoptim, found only: state, param"):
        inspect_checkpoint(saved(tmp_path, state))


@pytest.mark.parametrize(
    "noise",
    [b"not a checkpoint", b"", b"h\x05", b"\x80\x02", b"G12", b"]a", b"I1x\n", b"PK\x03\x04"],
)
def test_a_file_that_torch_cannot_read_is_refused(noise, tmp_path):
    path = tmp_path / "noise.pt"
    path.write_bytes(noise)
    with pytest.raises(ValueError, match=r"noise.pt must be a checkpoint that torch.load reads"):
        inspect_checkpoint(path)


def test_a_file_that_is_not_there_is_no_damaged_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        inspect_checkpoint(tmp_path / "missing.pt")
    with pytest.raises(OSError, match=re.escape(str(tmp_path))):
        inspect_checkpoint(tmp_path)


def test_a_file_of_torchs_older_format_is_read(lean, tmp_path):
    path = tmp_path / "old.pt"
    torch.save(lean.state_dict(), path, _use_new_zipfile_serialization=False)
    assert inspect_checkpoint(path) == inspect_checkpoint(saved(tmp_path, lean.state_dict()))


def test_a_file_with_code_in_it_is_refused(lean, tmp_path):
    with pytest.raises(ValueError, match=r"save a state_dict\(\)"):
        inspect_checkpoint(saved(tmp_path, {"optimizer": lean}))
