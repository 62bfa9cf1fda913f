"""Steps of an optimizer whose moments are in sketches, by the reference."""

import backends
import pytest
import torch
from gradients import STREAMS, dense_stream, sparse, sparse_stream, start
from moment_runs import by_element, by_row, moved, opened, random_rows

import sketchoptim as so
from sketchoptim import _rows
from sketchoptim.moments import Average

BITWISE = {
    "exact": "exact",
    "row-wise": "row-wise",
    "lean-0.1": so.Memory(None, by_row(conservative=True)),
    "lean-element": so.Memory(None, by_element(conservative=True)),
    "paper-mv": so.Memory(by_element(decay="paper"), by_element(decay="paper")),
    "paper-row": so.Memory(None, by_row(decay="paper")),
    "bucket": so.Memory(by_element(decay="bucket"), by_element(decay="bucket")),
}
SUMMING = {
    "linear": so.Memory(by_element(), by_element()),
    "ratio": so.Memory(by_element(), by_element(), form="ratio"),
    "linear-row": so.Memory(None, by_row()),
    "rank-one": "rank-one",
    "top-singular": so.Memory(so.TopSingular(), so.TopSingular()),
}
ALL = BITWISE | SUMMING


def trained(memory, gradients, shape, *, dtype=torch.float32, threads=1):
    """The weights, and the tensors of the state, after a step of the reference on each gradient."""
    parameter = torch.nn.Parameter(start(shape, dtype=dtype))
    optimizer = so.Adam([{"params": [parameter], "memory": memory}], lr=0.1, eps=0.05)
    with backends.stepping_by(None, threads=threads):
        for gradient in gradients:
            parameter.grad = gradient
            optimizer.step()
    state = optimizer.state[parameter]
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return {"parameter": parameter.detach(), **tensors}


def check_same_bits(found, expected):
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("name", ALL)
def test_a_step_does_not_depend_on_the_size_of_a_chunk(name, kind, monkeypatch):
    shape = (30, 3)
    stream = STREAMS[kind]
    expected = trained(ALL[name], stream(shape, 15, shift=1.0), shape)
    monkeypatch.setattr(_rows, "CHUNK_ELEMENTS", 20)
    found = trained(ALL[name], stream(shape, 15, shift=1.0), shape)
    if name in BITWISE:
        check_same_bits(found, expected)
    else:
        torch.testing.assert_close(found["parameter"], expected["parameter"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_the_order_of_ids_in_a_gradient_changes_no_bit(name):
    shape, generator = (30, 3), torch.Generator().manual_seed(5)
    gradients, shuffled = [], []
    for _ in range(10):
        ids, values = random_rows(generator, rows=30, is_signed=True)
        order = torch.randperm(len(ids), generator=generator)
        gradients.append(sparse(ids, values, shape))
        shuffled.append(sparse(ids[order], values[order], shape))
    check_same_bits(trained(ALL[name], shuffled, shape), trained(ALL[name], gradients, shape))


# In crowded tables, these go through a Python loop over rows.
ROW_BY_ROW = ("paper-mv", "paper-row", "bucket")
LARGE = [
    (name, shape)
    for name in ALL
    if name != "top-singular"
    for shape in [(10, 4_000) if name in ROW_BY_ROW else (3_000, 12), (2, 33_000), (33_000, 1)]
    if shape[0] < 33_000 or name not in ROW_BY_ROW
]


@pytest.mark.filterwarnings("ignore:.*active rows a bucket")
@pytest.mark.parametrize(("name", "shape"), LARGE, ids=str)
def test_the_number_of_threads_changes_no_bit_of_the_reference(name, shape, monkeypatch):
    """Shapes at which torch shares its sums out between threads: from 2^15 elements on.

    `test_top_singular.py` has the rank-one fit in l2, which solves problems of dim x dim.
    """
    monkeypatch.setattr(_rows, "CHUNK_ELEMENTS", 36_000)  # one row at a time, if it is that wide
    gradients = list(dense_stream(shape, 2))
    one, two = (trained(ALL[name], gradients, shape, threads=threads) for threads in (1, 2))
    check_same_bits(two, one)


def test_both_moments_of_a_parameter_share_their_buckets():
    parameter = torch.nn.Parameter(start((30, 3)))
    memory = so.Memory(by_element(depth=5), by_row(depth=3))
    optimizer = so.Adam([{"params": [parameter], "memory": memory}])
    parameter.grad = torch.ones(30, 3)
    optimizer.step()
    state = optimizer.state[parameter]
    assert torch.equal(state["first_words"][:3], state["second_words"])


# -- bfloat16 --------------------------------------------------------------------------------------

BFLOAT16 = {
    "lean-0.1": so.Memory(None, by_row(conservative=True, dtype=torch.bfloat16)),
    "paper-mv": so.Memory(*[by_element(decay="paper", dtype=torch.bfloat16)] * 2),
    "bucket": so.Memory(*[by_element(decay="bucket", dtype=torch.bfloat16)] * 2),
    "linear": so.Memory(*[by_element(dtype=torch.bfloat16)] * 2),
    "ratio": so.Memory(*[by_element(dtype=torch.bfloat16)] * 2, form="ratio"),
}


@pytest.mark.parametrize("name", BFLOAT16)
def test_a_bfloat16_table_trains_close_to_a_float32_one(name):
    shape = (30, 3)
    found = trained(BFLOAT16[name], sparse_stream(shape, 40), shape)
    expected = trained(ALL[name], sparse_stream(shape, 40), shape)
    assert found["second_counters"].dtype == torch.bfloat16
    way = (expected["parameter"] - start(shape)).norm()
    assert (found["parameter"] - expected["parameter"]).norm() < 0.03 * way


@pytest.mark.parametrize("name", BFLOAT16)
def test_a_bfloat16_table_rounds_the_same_way_in_the_same_run(name):
    shape = (30, 3)
    runs = [trained(BFLOAT16[name], sparse_stream(shape, 10), shape) for _ in range(2)]
    check_same_bits(*runs)


@pytest.mark.parametrize("form", [{"conservative": True}, {"decay": "paper"}], ids=str)
def test_a_small_moving_average_does_not_freeze_in_bfloat16(form):
    """Rounded to nearest it would stop at a third, where a thousandth of the way rounds away."""
    moment = opened(by_row(dtype=torch.bfloat16, width=64, **form), dim=1)
    ids, average = torch.arange(5), Average(0.999, 1 - 0.999)
    for step in range(1, 1000):
        estimates = moved(moment, ids, torch.ones(5, 1), average, step=step)
    assert estimates.mean().item() == pytest.approx(1 - 0.999**1000, rel=0.1)
