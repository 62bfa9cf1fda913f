"""What `memory_report` says an optimizer keeps."""

import pytest
import tiny_runs
import torch
from tiny_runs import PLANS, PRESET_PLANS, Plan, Run, TinyModel, batches
from torch import Tensor, nn

import sketchoptim as so

BOOK_KEEPING = ("step", "shape", "is_compressed", "skipped")


def report_of(plan: Plan, **options: object) -> tuple[Run, so.diagnostics.MemoryReport]:
    run = Run.start(plan, **options).train(batches(3))
    return run, so.memory_report(run.optimizer)


@tiny_runs.each(PLANS)
def test_bytes_are_those_of_the_tensors_in_the_state(plan):
    run, report = report_of(plan)
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    for parameter, found in zip(parameters, report.parameters, strict=True):
        state = run.optimizer.state[parameter]
        tensors = {key: value for key, value in state.items() if key not in BOOK_KEEPING}
        assert all(isinstance(value, Tensor) for value in tensors.values())
        assert found.state_bytes == sum(tensor.nbytes for tensor in tensors.values())
        for moment, moment_bytes in found.moment_bytes.items():
            own = [tensor.nbytes for key, tensor in tensors.items() if key.startswith(moment)]
            assert moment_bytes == sum(own)
        assert found.shape == tuple(parameter.shape)
        assert found.parameter_bytes == parameter.nbytes
    assert report.state_bytes == sum(found.state_bytes for found in report.parameters)
    assert report.exact_bytes == sum(found.exact_bytes for found in report.parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("kind", "options", "moments"),
    [
        (so.Adam, {}, 2),
        (so.AdamW, {}, 2),
        (so.RMSprop, {}, 1),
        (so.Adagrad, {}, 1),
        (so.SGD, {"momentum": 0.9}, 1),
        (so.SGD, {}, 0),
    ],
    ids=["Adam", "AdamW", "RMSprop", "Adagrad", "SGD with momentum", "SGD"],
)
def test_the_exact_equivalent_is_a_copy_for_each_moment_of_the_algorithm(
    kind, options, moments, dtype
):
    run, report = report_of(Plan(kind, "paper-mv", options), dtype=dtype)
    for found in report.parameters:
        assert found.exact_bytes == moments * found.parameter_bytes
    weights = sum(parameter.nbytes for parameter in run.model.parameters())
    assert report.exact_bytes == moments * weights


def test_folding_is_seen():
    one = so.Sketched(granularity="element", width=32, fold_at=(2,))
    run = Run.start(Plan(so.Adam, so.Memory(second=one))).train(batches(1))
    before = so.memory_report(run.optimizer).parameters[0].moment_bytes["second"]
    run.train(batches(1))
    after = so.memory_report(run.optimizer).parameters[0].moment_bytes["second"]
    assert before - after == 3 * 16 * tiny_runs.DIM * 4


@tiny_runs.each(PLANS)
def test_before_the_first_step_the_bytes_are_those_after_it(plan):
    run = Run.start(plan)
    run.backward(batches(1)[0])
    before = so.memory_report(run.optimizer)
    run.optimizer.step()
    assert so.memory_report(run.optimizer) == before


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_without_gradients_is_reported_as_its_groups_will_keep_it(device):
    with torch.device(device):
        model = nn.Sequential(nn.Embedding(8000, 8), nn.Linear(8, 8))
    report = so.memory_report(so.Adam(model))
    by_row = 3 * 333 * 4 + 3 * 4 * 8 + 4
    assert [it.state_bytes for it in report.parameters] == [by_row + 4 * 8, 512, 64]


def test_without_a_gradient_sparse_ones_are_assumed_for_what_is_shaped_like_a_table():
    table, layer = nn.Embedding(4000, 8, sparse=True), nn.Linear(8, 8)
    optimizer = so.Adam([*table.parameters(), *layer.parameters()])
    report = so.memory_report(optimizer)
    *_, note = str(report).splitlines()
    assert note == "sparse gradients assumed, dense ones make exact state: parameter 0"
    layer(table(torch.tensor([3]))).sum().backward()
    optimizer.step()
    after = so.memory_report(optimizer)
    assert after.state_bytes == report.state_bytes
    assert "assumed" not in str(after)


def test_a_table_that_is_frozen_after_training_keeps_its_state_as_exact_storage_would():
    run = Run.start(PRESET_PLANS["lean-0.1"]).train(batches(3))
    before = so.memory_report(run.optimizer)
    run.model.requires_grad_(False)
    assert so.memory_report(run.optimizer) == before


def test_asking_makes_no_state():
    run = Run.start(PRESET_PLANS["lean-0.1"])
    so.memory_report(run.optimizer)
    assert not run.optimizer.state


def test_names_are_those_of_named_parameters_else_numbers():
    model = TinyModel()
    names = [found.name for found in so.memory_report(so.Adam(model.named_parameters())).parameters]
    assert names == ["table.weight", "late.weight", "head.weight", "head.bias"]
    names = [found.name for found in so.memory_report(so.Adam(model.parameters())).parameters]
    assert names == ["parameter 0", "parameter 1", "parameter 2", "parameter 3"]


def test_a_large_table_is_printed_for_people_to_read():
    table = nn.Embedding(80_000, 32, sparse=True)
    optimizer = so.Adam([("table.weight", table.weight)])
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert str(so.memory_report(optimizer)).splitlines() == [
        "parameter     shape        first  second   state       exact   share",
        "table.weight  80,000 x 32      0  40,224  40,224  20,480,000  0.196%",
        "total                                     40,224  20,480,000  0.196%",
    ]


def test_several_optimizers_are_reported_as_one():
    first, second = (report_of(PRESET_PLANS[name]) for name in ("lean-0.1", "exact"))
    together = so.memory_report([first[0].optimizer, second[0].optimizer])
    assert together.parameters == first[1].parameters + second[1].parameters
    assert together.state_bytes == first[1].state_bytes + second[1].state_bytes


def test_an_optimizer_of_torch_is_refused_alone_and_among_ours():
    parameter = nn.Parameter(torch.ones(1))
    theirs = torch.optim.SGD([parameter])
    for subject in (theirs, [so.SGD([parameter]), theirs]):
        with pytest.raises(TypeError, match="optimizer must be one of sketchoptim's, got SGD"):
            so.memory_report(subject)
