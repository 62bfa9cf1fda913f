"""Every optimizer over every storage against the naive loops of `naive`."""

import backends
import naive
import numpy as np
import pytest
import torch
from gradients import STREAMS, start

import sketchoptim as so

ROWS, DIM, WIDTH, STEPS = 20, 3, 8, 20
SHAPES = {"lean-0.1": (120, 2)}  # enough rows for a table of several buckets
MOMENTUM = {"SGD": {"momentum": 0.9}}  # without which nothing is kept


def sketched(decay="linear", granularity="element", **options):
    return so.Sketched(
        **{"width": WIDTH, "decay": decay, "granularity": granularity, "seed": 3, **options}
    )


FIRSTS = {
    "dropped": None,
    "exact": so.Exact(),
    "top-singular": so.TopSingular(),
    "linear": sketched("linear"),
    "paper": sketched("paper"),
    "bucket": sketched("bucket"),
}
SECONDS = {
    "exact": so.Exact(),
    "row-wise": so.RowWise(),
    "row-wise-columns": so.RowWise(columns=True),
    "rank-one": so.RankOne(),
    "top-singular": so.TopSingular(),
    "linear-element": sketched("linear"),
    "paper-element": sketched("paper"),
    "bucket-element": sketched("bucket"),
    "conservative-element": sketched(conservative=True),
    "linear-row": sketched("linear", "row"),
    "paper-row": sketched("paper", "row"),
    "bucket-row": sketched("bucket", "row"),
    "conservative-row": sketched("linear", "row", conservative=True),
    "linear-row-columns": sketched("linear", "row", columns=True),
    "paper-row-columns": sketched("paper", "row", columns=True),
    "conservative-row-columns": sketched("linear", "row", conservative=True, columns=True),
}


def pairs(gradient):
    """A gradient as ``(id, vector)`` pairs of plain numbers, one for each row that it names."""
    if not gradient.is_sparse:
        return list(enumerate(by_row(gradient)))
    return list(zip(gradient._indices()[0].tolist(), by_row(gradient._values()), strict=True))


def by_row(tensor):
    """A tensor as a float64 matrix with a row for each of its rows."""
    return tensor.detach().double().reshape(tensor.shape[0], tensor.shape[1:].numel()).numpy()


BACKENDS = (None, *backends.LEVELS[-1:])


def counters(twin):
    """Copies of the counters of the naive optimizer's sketches."""
    kept = {"first": twin.first, "second": twin.second}
    return {
        name: moment.sketch.counters.copy()
        for name, moment in kept.items()
        if isinstance(moment, naive.SketchedMoment)
    }


def check_against_naive(
    name,
    memory,
    kind,
    *,
    shape=(ROWS, DIM),
    dtype=torch.float32,
    shift=0.0,
    **options,
):
    """Runs all backends on the same gradients; compares weights and tables after every step."""
    options = {"lr": 0.1, **options}
    gradients = list(STREAMS[kind](shape, STEPS, dtype=dtype, shift=shift))
    twin = getattr(naive, name)(by_row(start(shape, dtype=dtype)), memory, **options)
    expected = []
    for gradient in gradients:
        twin.step(naive.summed(pairs(gradient)), is_sparse=kind == "sparse")
        expected.append((twin.x.copy(), counters(twin)))
    assert np.abs(expected[-1][0] - by_row(start(shape))).max() > 0.1  # it went somewhere
    for backend in BACKENDS:
        parameter = torch.nn.Parameter(start(shape, dtype=dtype))
        optimizer = getattr(so, name)([{"params": [parameter], "memory": memory}], **options)
        state = optimizer.state[parameter]
        with backends.stepping_by(backend):
            for gradient, (x, counters_of) in zip(gradients, expected, strict=True):
                parameter.grad = gradient
                optimizer.step()
                np.testing.assert_allclose(by_row(parameter), x, rtol=5e-5, atol=5e-5)
                for moment, expected_counters in counters_of.items():
                    if f"{moment}_counters" in state:
                        found = (
                            state[f"{moment}_counters"].double() * state[f"{moment}_scale"].item()
                        )
                        np.testing.assert_allclose(
                            found.numpy(), expected_counters, rtol=2e-5, atol=2e-5
                        )


@backends.needs_native
def test_the_native_kernels_are_among_what_is_compared():
    assert len(BACKENDS) == 2


def shift_for(*storages):
    """What makes one singular value dominate, without which the largest is not well defined."""
    return 2.0 if any(isinstance(storage, so.TopSingular) for storage in storages) else 0.0


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("second", SECONDS)
def test_adam_without_a_first_moment_is_the_naive_one(second, kind):
    storage = SECONDS[second]
    memory = so.Memory(None, storage)
    check_against_naive("Adam", memory, kind, eps=0.01, shift=shift_for(storage))


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("second", ["exact", "conservative-row"])
@pytest.mark.parametrize("first", [name for name in FIRSTS if name != "dropped"])
def test_adam_with_every_first_moment_is_the_naive_one(first, second, kind):
    memory = so.Memory(FIRSTS[first], SECONDS[second])
    shift = shift_for(memory.first, memory.second)
    check_against_naive("Adam", memory, kind, betas=(0.8, 0.97), eps=0.05, shift=shift)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("second", SECONDS)
def test_adagrad_is_the_naive_one(second, kind):
    storage = SECONDS[second]
    check_against_naive(
        "Adagrad",
        so.Memory(None, storage),
        kind,
        lr_decay=0.05,
        initial_accumulator_value=0.3,
        eps=0.01,
        shift=shift_for(storage),
    )


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("second", ["exact", "rank-one", "paper-element", "conservative-row"])
def test_rmsprop_is_the_naive_one(second, kind):
    storage = SECONDS[second]
    memory = so.Memory(None, storage)
    check_against_naive("RMSprop", memory, kind, alpha=0.9, eps=0.01, shift=shift_for(storage))


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("first", FIRSTS)
def test_dampened_momentum_is_the_naive_one(first, kind):
    storage = FIRSTS[first]
    options = {"momentum": 0.9, "dampening": 0.4, "shift": shift_for(storage)}
    check_against_naive("SGD", so.Memory(storage), kind, **options)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("first", ["exact", "linear", "paper"])
def test_nesterov_momentum_is_the_naive_one(first, kind):
    check_against_naive("SGD", so.Memory(FIRSTS[first]), kind, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("kind", STREAMS)
def test_sgd_without_momentum_is_the_naive_one(kind):
    check_against_naive("SGD", so.Memory(FIRSTS["paper"]), kind)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("memory", ["lean-0.1", "paper-mv"])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RMSprop", "Adam", "AdamW"])
def test_weight_decay_and_maximize_are_the_naive_ones(name, memory, kind):
    options = {"weight_decay": 0.3, "maximize": True, **MOMENTUM.get(name, {})}
    check_against_naive(
        name, so.storage.PRESETS[memory], kind, shape=SHAPES.get(memory, (30, 2)), **options
    )


@pytest.mark.parametrize("depth", [1, 2, 4, 5])
@pytest.mark.parametrize("decay", ["linear", "paper", "bucket"])
def test_every_depth_is_the_naive_one(decay, depth):
    storage = sketched(decay, depth=depth)
    check_against_naive("Adam", so.Memory(storage, storage), "sparse", eps=0.05)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("depth", [1, 3, 4])
def test_the_median_of_quotients_is_the_naive_one(depth, kind):
    storage = sketched("linear", depth=depth)
    memory = so.Memory(storage, storage, form="ratio")
    check_against_naive("Adam", memory, kind, betas=(0.9, 0.99), eps=0.05)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize(
    "memory",
    [
        so.Memory(so.Exact(), so.Exact(), clip=0.5),
        so.Memory(None, so.Exact(), clip=0.9),
        so.Memory(sketched("paper"), sketched("paper"), clip=0.5),
        so.Memory(sketched(), sketched(), form="ratio", clip=0.5),
    ],
    ids=["exact", "exact-second", "paper", "ratio"],
)
def test_a_clipped_step_is_the_naive_one(memory, kind):
    check_against_naive("Adam", memory, kind)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RMSprop"])
def test_a_clip_bounds_the_step_of_every_optimizer(name, kind):
    memory = so.Memory(so.Exact(), so.Exact(), clip=0.5)
    check_against_naive(name, memory, kind, **MOMENTUM.get(name, {}))


@pytest.mark.parametrize("name", ["Adagrad", "Adam"])
@pytest.mark.parametrize(
    "storage",
    [
        sketched("paper", clean_every=4, clean_by=0.25),
        sketched("bucket", clean_every=3, clean_by=0.5),
        sketched("linear", clean_every=5, clean_by=0.5),
        sketched("linear", "row", conservative=True, clean_every=5, clean_by=0.0),
    ],
    ids=["paper", "bucket", "linear", "conservative"],
)
def test_cleaning_is_the_naive_one(storage, name):
    check_against_naive(name, so.Memory(None, storage), "sparse", eps=0.01)


@pytest.mark.parametrize(
    "memory",
    [
        so.Memory(sketched("paper", fold_at=(4, 9)), sketched("paper", fold_at=(6,))),
        so.Memory(sketched("bucket", fold_at=(5,)), sketched("bucket", fold_at=(5,))),
        so.Memory(sketched(fold_at=(5, 6)), sketched(fold_at=(5, 6)), form="ratio"),
        so.Memory(None, sketched("linear", "row", conservative=True, fold_at=(1, 8, 15))),
        so.Memory(None, sketched("paper", fold_at=(6,), clean_every=6, clean_by=0.5)),
    ],
    ids=["paper", "bucket", "ratio", "conservative", "cleaned"],
)
def test_folding_is_the_naive_one(memory):
    check_against_naive("Adam", memory, "sparse", eps=0.05)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("preset", [name for name in so.storage.PRESETS if name != "8-bit"])
def test_every_preset_is_the_naive_one_in_float64_too(preset, kind):
    memory = so.storage.PRESETS[preset]
    check_against_naive(
        "Adam", memory, kind, shape=SHAPES.get(preset, (30, 2)), dtype=torch.float64, eps=0.01
    )


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("shape", [(30,), (20, 1), (9, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("preset", ["lean-0.1", "paper-mv", "rank-one"])
def test_every_shape_of_a_row_is_the_naive_one(preset, shape, kind):
    check_against_naive("Adam", so.storage.PRESETS[preset], kind, shape=shape, eps=0.05)


@pytest.mark.parametrize("is_named", [False, True], ids=["numbered", "named"])
@pytest.mark.parametrize("memory", ["lean-0.1", "paper-mv"])
def test_each_parameter_of_an_optimizer_has_its_own_hash(memory, is_named):
    """Seeded by its name, or by its place in the optimizer where it has none."""
    shape, memory = SHAPES.get(memory, (30, 2)), so.storage.PRESETS[memory]
    parameters = [torch.nn.Parameter(start(shape)) for _ in range(3)]
    keys = ["user", "item", "user.bias"] if is_named else [0, 1, 2]
    given = [*zip(keys, parameters, strict=True)] if is_named else parameters
    groups = [{"params": given[:2]}, {"params": given[2:]}]
    optimizer = so.Adam(groups, lr=0.1, eps=0.05, memory=memory)
    twins = [
        naive.Adam(p.detach().numpy(), memory, lr=0.1, eps=0.05, number=key)
        for key, p in zip(keys, parameters, strict=True)
    ]
    for gradient in STREAMS["sparse"](shape, STEPS):
        for parameter, twin in zip(parameters, twins, strict=True):
            parameter.grad = gradient
            twin.step(naive.summed(pairs(gradient)), is_sparse=True)
        optimizer.step()
    for parameter, twin in zip(parameters, twins, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), twin.x, rtol=5e-5, atol=5e-5)
    assert not torch.equal(parameters[0], parameters[1])
    assert not torch.equal(parameters[1], parameters[2])


@pytest.mark.parametrize("first_kind", STREAMS)
@pytest.mark.parametrize("memory", ["lean-0.1", "paper-mv", "rank-one", "row-wise"])
def test_a_compressed_parameter_may_change_between_sparse_and_dense_gradients(memory, first_kind):
    shape, memory = SHAPES.get(memory, (30, 2)), so.storage.PRESETS[memory]
    parameter = torch.nn.Parameter(start(shape))
    optimizer = so.Adam([{"params": [parameter], "memory": memory}], lr=0.1, eps=0.05)
    twin = naive.Adam(parameter.detach().numpy(), memory, lr=0.1, eps=0.05)
    streams = [STREAMS["sparse"](shape, STEPS), STREAMS["dense"](shape, STEPS)]
    if first_kind == "dense":
        streams.reverse()
    for gradients in zip(*streams, strict=True):
        for gradient in gradients:
            parameter.grad = gradient
            optimizer.step()
            twin.step(naive.summed(pairs(gradient)), is_sparse=gradient.is_sparse)
    np.testing.assert_allclose(parameter.detach().numpy(), twin.x, rtol=5e-5, atol=5e-5)
