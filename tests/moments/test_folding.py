"""Tables that halve: what they started from, and when their own error allows it."""

import backends
import pytest
import torch
from gradients import sparse_stream, start
from moment_runs import moved, opened, random_rows
from tiny_runs import bits, differences
from torch import nn

import sketchoptim as so
from sketchoptim.moments import Average, estimate_error
from sketchoptim.moments._sketched import _FOLD_CHECK_STEPS as CHECKED

ROWS, DIM = 2_000, 4
SUM = Average(1.0, 1.0)
FORMS = {
    "linear": {"granularity": "element"},
    "paper": {"granularity": "element", "decay": "paper"},
    "conservative": {"granularity": "element", "conservative": True},
    "lean-0.1": {"conservative": True},
    "bfloat16": {"granularity": "element", "dtype": torch.bfloat16},
}


def filled(name="second", *, hot=40, **options):
    """A moment with some heavy rows among many light ones."""
    moment = opened(so.Sketched(**options), name, rows=ROWS, dim=DIM)
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(ROWS)
    values = torch.rand(ROWS, DIM, generator=generator) * 1e-3
    values[:hot] += 1
    moved(moment, ids, values, SUM, step=1)
    return moment


def error_of(moment):
    return estimate_error(moment.sketch, ROWS).relative


# -- what a table starts from ---------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_folding_keeps_what_a_row_started_from_single(form):
    storage = so.Sketched(width=64, fold_at=(1, 2), **form)
    moment = opened(storage, rows=ROWS, dim=DIM, fill=0.25)
    none = torch.zeros(0, dtype=torch.int64), torch.zeros(0, DIM)
    for step, width in ((1, 32), (2, 16)):
        moved(moment, *none, SUM, step=step)
        assert moment.sketch.width == width
        estimates = moment.estimate(torch.arange(ROWS))
        assert (estimates == 0.25).all()


@pytest.mark.parametrize("backend", [None, *backends.LEVELS[-1:]], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_folded_table_with_a_start_keeps_its_dtype_and_training_goes_on(form, backend):
    shape = (300, DIM)
    parameter = nn.Parameter(start(shape))
    storage = so.Sketched(width=64, fold_at=(2,), **form)
    optimizer = so.Adagrad(
        [parameter], memory=so.Memory(second=storage), initial_accumulator_value=0.1
    )
    with backends.stepping_by(backend):
        trained(optimizer, parameter, sparse_stream(shape, 4))
    assert optimizer.state[parameter]["second_counters"].dtype == storage.dtype


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_merging_counts_what_a_row_started_from_once(form):
    one, other = (
        opened(so.Sketched(width=64, **form), rows=ROWS, dim=DIM, fill=0.25) for _ in range(2)
    )
    for moment in (one, other):
        moved(moment, torch.tensor([7]), torch.full((1, DIM), 0.5), SUM)
        moment.sketch.scale_(0.5)
    one.sketch.merge_(other.sketch)
    assert (one.estimate(torch.tensor([7])) == 2 * 0.25 + 0.125).all()
    assert one.estimate(torch.arange(ROWS)).min() == 0.125


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("factor", [0.5, 2.0**-40, 0.0], ids=["lazily", "at once", "to nothing"])
def test_what_a_row_started_from_shrinks_with_the_table(form, factor):
    moment = opened(so.Sketched(width=64, **form), rows=ROWS, dim=DIM, fill=0.25)
    moment.sketch.scale_(factor)
    moment.fold_()
    assert moment.sketch.start == 0.25 * factor
    assert (moment.estimate(torch.arange(ROWS)) == 0.25 * factor).all()


def test_merging_what_started_from_another_value_is_refused():
    one, other = (opened(so.Sketched(width=64), fill=fill).sketch for fill in (0.25, 0.5))
    with pytest.raises(ValueError, match=r"must have started from 0\.25 .* got 0\.5"):
        one.merge_(other)
    assert (one.counters == 0.25).all()


def test_folding_after_cleaning_keeps_the_cleaned_start_single():
    storage = so.Sketched(width=8, fold_at=(3,), clean_every=2, clean_by=0.5)
    moment = opened(storage, fill=0.5)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 4):
        ids, values = random_rows(generator)
        moved(moment, ids, values * 0, SUM, step=step)
    assert (moment.estimate(torch.arange(40)) == 0.25).all()


@pytest.mark.parametrize("backend", [None, *backends.LEVELS[-1:]], ids=str)
def test_a_folded_adagrad_never_underestimates_and_starts_once(backend):
    shape = (300, 3)
    parameter = nn.Parameter(start(shape))
    memory = so.Memory(second=so.Sketched(width=256, granularity="element", fold_at=(2,)))
    optimizer = so.Adagrad([parameter], memory=memory, initial_accumulator_value=0.5)
    truth = torch.full(shape, 0.5)
    with backends.stepping_by(backend):
        for gradient in sparse_stream(shape, 4):
            parameter.grad = gradient
            optimizer.step()
            truth += gradient.to_dense() ** 2
    estimates = so.to_torch(optimizer).state[parameter]["sum"]
    assert (estimates >= truth * (1 - 1e-5)).all()
    assert estimates.min() == 0.5


# -- when the error allows it ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["first", "second"])
@pytest.mark.parametrize("form", ["linear", "paper", "bfloat16"])
def test_a_table_folds_until_its_error_would_pass_the_bound(form, name):
    moment = filled(name, width=4096, fold_when=0.5, **FORMS[form])
    widths, errors = [moment.sketch.width], [error_of(moment)]
    for check in range(1, 8):
        moment.maintain_(check * CHECKED)
        widths.append(moment.sketch.width)
        errors.append(error_of(moment))
    assert widths[1] == 2048
    assert widths[-1] == widths[-2] >= 128
    assert max(errors) < 0.5
    assert moment.tensors["counters"] is moment.sketch.counters
    moment.fold_()
    assert error_of(moment) >= 0.5


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_table_whose_error_is_large_stays_as_it_is(form):
    moment = filled(width=64, fold_when=0.01, **form)
    before = {part: tensor.clone() for part, tensor in moment.tensors.items()}
    moment.maintain_(CHECKED)
    for part, tensor in before.items():
        assert torch.equal(moment.tensors[part], tensor)


def test_a_table_is_looked_at_once_in_many_steps():
    moment = filled(width=4096, fold_when=10.0)
    for step in range(1, CHECKED):
        moment.maintain_(step)
    assert moment.sketch.width == 4096
    moment.maintain_(CHECKED)
    assert moment.sketch.width == 2048


def test_a_table_of_odd_width_stays_as_it_is():
    moment = filled(width=64 * 3, fold_when=1e9)
    for check in range(1, 10):
        moment.maintain_(check * CHECKED)
    assert moment.sketch.width == 3


def test_equally_folded_tables_merge():
    folded = [filled(width=1024, fold_when=1.0, granularity="element") for _ in range(2)]
    for moment in folded:
        moment.maintain_(CHECKED)
    ids = torch.arange(ROWS)
    alone = folded[0].estimate(ids)
    assert folded[0].sketch.width == 512
    folded[0].sketch.merge_(folded[1].sketch)
    torch.testing.assert_close(folded[0].estimate(ids), 2 * alone)


def trained(optimizer, parameter, gradients):
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()


@pytest.mark.parametrize("backend", [None, *backends.LEVELS[-1:]], ids=str)
@pytest.mark.parametrize("memory", ["lean-0.1", "both"])
def test_training_goes_on_after_a_fold_and_from_a_checkpoint(memory, backend):
    shape = (300, 3)
    lean = so.Sketched(width=64, conservative=True, fold_when=1e9)
    # Of which the second folds and the first never does, so that their widths part.
    wide = so.Sketched(width=128, granularity="element")
    memory = so.Memory(None, lean) if memory == "lean-0.1" else so.Memory(wide, lean)
    gradients = list(sparse_stream(shape, 6))

    def fresh(values):
        parameter = nn.Parameter(values.clone())
        return parameter, so.Adam([parameter], lr=0.1, memory=memory)

    with backends.stepping_by(backend):
        parameter, optimizer = fresh(start(shape))
        trained(optimizer, parameter, gradients[:2])
        optimizer.state[parameter]["step"].fill_(CHECKED - 1)
        trained(optimizer, parameter, gradients[2:3])
        assert optimizer.state[parameter]["second_counters"].shape == (3, 32, 1)
        again, loaded = fresh(parameter.detach())
        loaded.load_state_dict(optimizer.state_dict())
        for one, its_parameter in ((optimizer, parameter), (loaded, again)):
            trained(one, its_parameter, gradients[3:])
    assert torch.equal(parameter, again)
    ours, theirs = bits(optimizer, [("p", parameter)]), bits(loaded, [("p", again)])
    assert differences(ours, theirs) == []


def test_a_checkpoint_of_a_width_that_folding_does_not_give_is_refused():
    parameter = nn.Parameter(torch.zeros(300, 3))
    storage = so.Sketched(width=64, conservative=True, fold_when=0.1)
    optimizer = so.Adam([parameter], memory=so.Memory(None, storage))
    trained(optimizer, parameter, sparse_stream((300, 3), 1))
    saved = optimizer.state_dict()
    saved["state"][0]["second_counters"] = torch.zeros(3, 48, 1)
    with pytest.raises(
        ValueError, match=r"its second_counters has shape \[3, 48, 1\], not \[3, 64, 1\]"
    ):
        optimizer.load_state_dict(saved)
