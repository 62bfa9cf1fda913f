"""Plans: bytes to the byte, budgets kept, and the bytes where they help."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sketchoptim as so
from sketchoptim import optim
from sketchoptim.planning._planner import budget_bytes
from sketchoptim.planning._prediction import PredictedError

LM1B = [("embedding", (793_471, 256)), ("softmax", (793_471, 256))]
# Options without which an optimizer does not have the moments that it is planned with.
OPTIONS = {"SGD": {"momentum": 0.9}}


class Small(nn.Module):
    """Two tables with sparse gradients and a dense layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5000, 8, sparse=True)
        self.users = nn.EmbeddingBag(700, 8, sparse=True, mode="sum")
        self.dense = nn.Linear(8, 3)

    def train_(self, optimizer: torch.optim.Optimizer) -> None:
        for step in range(2):
            ids = torch.arange(step, 40 + step).view(4, 10)
            optimizer.zero_grad()
            self.dense(self.words(ids).sum(1) + self.users(ids)).square().sum().backward()
            optimizer.step()


@pytest.mark.parametrize("kind", optim.OPTIMIZERS)
@pytest.mark.parametrize("granularity", ["row", "element"])
@pytest.mark.parametrize("budget", ["4KB", "20KB", "10MB"])
def test_predicted_bytes_are_those_that_training_measures(kind, granularity, budget):
    model = Small()
    plan = so.plan(model, budget, optimizer=kind, granularity=granularity, ids_per_step=100)
    options = OPTIONS.get(kind, {})
    optimizer = optim.OPTIMIZERS[kind](plan.param_groups(model), lr=0.01, **options)
    model.train_(optimizer)
    measured = {p.name: p for p in so.memory_report(optimizer).parameters}
    assert measured.keys() == {p.name for p in plan.parameters}
    for planned in plan.parameters:
        found = measured[planned.name]
        assert planned.moment_bytes == found.moment_bytes
        assert planned.exact_bytes == found.exact_bytes
        assert planned.parameter_bytes == found.parameter_bytes
    assert plan.state_bytes <= plan.budget_bytes


def test_frozen_parameters_take_nothing_in_a_plan_as_in_training():
    model = Small()
    model.words.requires_grad_(False)
    plan = so.plan(model, 1.0)
    groups = plan.param_groups(model)
    grouped = [name for group in groups for name, _ in group["params"]]
    assert sorted(grouped) == ["dense.bias", "dense.weight", "users.weight"]
    optimizer = so.Adam([*groups, {"params": [("words.weight", model.words.weight)]}])
    model.train_(optimizer)
    report = so.memory_report(optimizer)
    assert (plan.state_bytes, plan.exact_bytes) == (report.state_bytes, report.exact_bytes)
    assert so.plan(optimizer, 1.0).exact_bytes == plan.exact_bytes


@pytest.mark.parametrize("first", [so.Exact(), so.Sketched(granularity="element")])
def test_a_first_moment_is_kept_where_it_is_asked_for(first):
    model = Small()
    plan = so.plan(model, "800KB", first=first)
    optimizer = so.Adam(plan.param_groups(model), lr=0.01)
    model.train_(optimizer)
    assert plan.memory["words.weight"].first == first
    assert plan.state_bytes == so.memory_report(optimizer).state_bytes


def test_a_sum_that_starts_from_something_takes_its_bytes():
    model = Small()
    options = {"lr": 0.01, "initial_accumulator_value": 0.5}
    first = so.Adagrad(model.named_parameters(), **options)
    model.train_(first)
    plan = so.plan(first, "4KB")
    optimizer = so.Adagrad(plan.param_groups(model), **options)
    model.train_(optimizer)
    assert plan.state_bytes == so.memory_report(optimizer).state_bytes


def test_sketches_that_fold_start_at_a_width_that_halves():
    model = Small()
    plan = so.plan(model, "9KB", fold_when=0.1)
    storage = plan.memory["words.weight"].second
    assert storage.fold_when == 0.1
    assert storage.width % 64 == 0
    optimizer = so.Adam(plan.param_groups(model), lr=0.01)
    model.train_(optimizer)
    assert plan.state_bytes == so.memory_report(optimizer).state_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_bytes_follow_the_dtype_of_the_parameters(dtype):
    model = Small().to(dtype)
    plan = so.plan(model, 0.6, granularity="element")
    optimizer = so.Adam(plan.param_groups(model), lr=0.01)
    model.train_(optimizer)
    assert plan.state_bytes == so.memory_report(optimizer).state_bytes


def test_a_model_on_the_meta_device_is_planned_as_any_other():
    with torch.device("meta"):
        model = Small()
    assert so.plan(model, "5KB") == so.plan(Small(), "5KB")


def test_a_table_of_the_meta_device_may_be_larger_than_any_machine():
    with torch.device("meta"):
        model = nn.Embedding(49_500_000, 1024, sparse=True)
    plan = so.plan(model, "30MB")
    assert plan.exact_bytes == 405_504_000_000
    assert plan.state_bytes <= 30_000_000


def test_an_optimizer_is_planned_for_the_gradients_it_has():
    model = Small()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    model.train_(optimizer)
    plan = so.plan(optimizer, "20KB", optimizer="Adagrad")
    assert plan.memory.keys() == {"words.weight", "users.weight"}
    assert so.plan(torch.optim.SparseAdam([model.words.weight]), "20KB").optimizer == "Adam"


class Own(optim.Optimizer):
    """An optimizer that a user wrote: one moment, which forgets half of itself."""

    moment_names = ("second",)

    def __init__(self, params, *, memory="lean-0.1"):
        options = {"lr": 0.1, "weight_decay": 0.0, "maximize": False, "nonfinite": "raise"}
        super().__init__(params, memory=memory, **options)

    def rule(self, group, step, *, memory, is_sparse):
        return optim.Rule(
            lambda rows, gradient, first, second: rows - group["lr"] * gradient / second.sqrt(),
            second=optim.Average(0.5, 0.5),
        )


def test_an_optimizer_of_the_users_own_is_planned_by_its_rule():
    shape = (5000, 8)
    plan = so.plan(Own([("table", nn.Parameter(torch.zeros(shape)))]), "2KB", tables=["table"])
    expected = so.plan([("table", shape)], "2KB", optimizer="RMSprop", beta2=0.5)
    assert plan.optimizer == "Own"
    assert plan.parameters == expected.parameters


def test_sgd_is_planned_with_momentum_unless_the_given_one_has_none():
    model = Small()
    copies = [so.plan(model, "10MB", optimizer="SGD").exact_bytes]
    for momentum in (0.0, 0.9):
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=momentum)
        copies.append(so.plan(optimizer, "10MB", tables=["words.weight"]).exact_bytes)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert copies == [weights, 0, weights]


@pytest.mark.parametrize(
    ("kind", "beta2"), [("Adam", 0.999), ("AdamW", 0.999), ("RMSprop", 0.99), ("Adagrad", 1.0)]
)
def test_the_decay_of_a_named_optimizer_is_its_default(kind, beta2):
    shapes = [("table", (5000, 8))]
    assert so.plan(shapes, "2KB", optimizer=kind) == so.plan(
        shapes, "2KB", optimizer=kind, beta2=beta2
    )


def test_the_decay_of_a_given_optimizer_is_taken_from_it():
    table = nn.Parameter(torch.zeros(5000, 8))
    slow, fast = (
        so.plan(torch.optim.SparseAdam([("table", table)], betas=(0.9, beta2)), "2KB")
        for beta2 in (0.999, 0.5)
    )
    assert slow == so.plan([("table", (5000, 8))], "2KB", beta2=0.999)
    assert fast == so.plan([("table", (5000, 8))], "2KB", beta2=0.5)
    assert fast != slow


def test_dense_parameters_are_exact_and_counted():
    plan = so.plan(Small(), "10MB")
    dense = next(p for p in plan.parameters if p.name == "dense.weight")
    assert dense.memory is None
    assert dense.state_bytes == dense.exact_bytes == 2 * 3 * 8 * 4
    assert dense.reason == "dense gradients"


def test_tables_may_be_given_as_tensors_of_a_model_or_an_optimizer():
    model = Small()
    by_name = so.plan(model, 1.0, tables="dense.weight")
    assert so.plan(model, 1.0, tables=model.dense.weight) == by_name
    optimizer = so.Adam(model.named_parameters())
    assert so.plan(optimizer, 1.0, tables=[model.dense.weight]).memory == by_name.memory
    with pytest.raises(ValueError, match=r"or their names, got \['a tensor of shape \[2\]'\]"):
        so.plan(model, 1.0, tables=[torch.ones(2)])


def test_named_tables_are_compressed_whatever_their_gradients():
    plan = so.plan(Small(), "10MB", tables=["dense.weight", "words.weight"])
    assert plan.memory.keys() == {"dense.weight", "words.weight"}


@settings(max_examples=15)
@given(share=st.floats(0.0005, 1), sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=3))
def test_a_budget_is_never_exceeded(share, sizes):
    shapes = [(f"table {number}", (rows, 16)) for number, rows in enumerate(sizes)]
    with contextlib.suppress(ValueError):  # of a budget below the smallest
        plan = so.plan(shapes, share, ids_per_step=100)
        assert plan.state_bytes <= plan.budget_bytes


@pytest.mark.parametrize("granularity", ["row", "element"])
@pytest.mark.parametrize("shapes", [LM1B, [("small", (7, 5))], [("wide", (10, 10**6))]])
def test_the_smallest_budget_that_is_named_is_feasible_and_one_byte_less_is_not(
    shapes, granularity
):
    with pytest.raises(ValueError, match="budget must be at least") as refused:
        so.plan(shapes, 1, granularity=granularity)
    smallest = int(str(refused.value).split()[5].replace(",", ""))
    plan = so.plan(shapes, smallest, granularity=granularity)
    assert plan.state_bytes == smallest
    with pytest.raises(ValueError, match=f"at least {smallest:,} bytes"):
        so.plan(shapes, smallest - 1, granularity=granularity)


def test_a_budget_that_dense_state_alone_exceeds_is_refused_with_a_remedy():
    with pytest.raises(
        ValueError, match=r"216 of them are exact state .* name large ones as tables"
    ):
        so.plan(Small(), 100)


def test_uniform_tables_get_more_than_skewed_ones():
    shapes = [("skewed", (10**5, 16)), ("uniform", (10**5, 16))]
    plan = so.plan(shapes, "60KB", zipf={"skewed": 1.3, "uniform": 0.3})
    skewed, uniform = plan.parameters
    assert uniform.state_bytes > 2 * skewed.state_bytes
    assert (round(skewed.exponent, 2), round(uniform.exponent, 2)) == (1.3, 0.3)


def test_the_summed_error_is_lower_than_that_of_equal_shares():
    shapes = [("large", (10**6, 16)), ("uniform", (10**5, 16)), ("small", (3000, 16))]
    zipf = {"large": 1.2, "uniform": 0.2, "small": 1.0}
    together = so.plan(shapes, 60_000, zipf=zipf)
    equal = [so.plan([shape], 20_000, zipf=zipf[shape[0]]) for shape in shapes]
    apart = [plan.parameters[0] for plan in equal]
    assert sum(p.state_bytes for p in apart) <= 60_000
    summed = [sum(p.error.relative for p in found) for found in (together.parameters, apart)]
    assert summed[0] < 0.8 * summed[1]


@pytest.mark.parametrize(
    ("granularity", "finest"), [("row", so.RowWise(columns=True)), ("element", so.Exact())]
)
def test_an_array_that_is_asked_for_needs_no_sketch(granularity, finest):
    plan = so.plan(Small(), 1.0, granularity=granularity, finest="array")
    for table in ("words.weight", "users.weight"):
        assert plan.memory[table] == so.Memory(first=None, second=finest)
    assert [p.error for p in plan.parameters if p.memory] == [PredictedError(0.0, 0.0)] * 2


@pytest.mark.parametrize("granularity", ["row", "element"])
def test_a_generous_budget_gives_no_more_than_the_default(granularity):
    plan = so.plan(LM1B, 1.0, granularity=granularity)
    _, width, _ = so.Sketched(granularity=granularity).counters_shape(793_471, 256)
    for table in plan.parameters:
        assert table.memory.second.width == width
        assert table.reason.endswith("rows a bucket, the default")
    more = so.plan(LM1B, 1.0, granularity=granularity, finest="array")
    assert more.state_bytes > plan.state_bytes


def test_a_generous_plan_takes_the_bytes_of_lean():
    model = Small()
    lean = so.Adam(model.named_parameters(), lr=0.01, memory="lean")
    model.train_(lean)
    found, planned = (
        {p.name: p.state_bytes for p in report.parameters}
        for report in (so.memory_report(lean), so.plan(model, "10MB"))
    )
    assert planned["words.weight"] == found["words.weight"]


def test_a_table_of_few_rows_may_have_an_array():
    plan = so.plan([("countries", (250, 64))], "2KB")
    assert plan.memory["countries"].second == so.RowWise(columns=True)


def test_measured_counts_and_ids_take_the_place_of_an_assumed_exponent():
    ids = torch.randint(5000, (30_000,), generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(ids, minlength=5000)
    shapes = [("words", (5000, 8))]
    by_ids = so.plan(shapes, "2KB", ids={"words": ids})
    assert by_ids == so.plan(shapes, "2KB", counts={"words": counts.numpy()})
    assumed = so.plan(shapes, "2KB")
    assert by_ids.parameters[0].exponent < 0.2 < 0.9 < assumed.parameters[0].exponent
    assert by_ids.parameters[0].error.relative > assumed.parameters[0].error.relative


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (200_000_000, 200_000_000),
        ("200MB", 200_000_000),
        ("1.5GiB", 1_610_612_736),
        ("1.5 gib", 1_610_612_736),
        ("1,000", 1000),
        ("12", 12),
        ("2TB", 2 * 10**12),
        (0.5, 500_000),
        ("5%", 50_000),
        (1.0, 10**6),
        (np.int64(12), 12),
        (np.float32(0.5), 500_000),
    ],
)
def test_a_budget_is_bytes_or_a_share_of_exact_state(budget, expected):
    assert budget_bytes(budget, 10**6) == expected


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        ("much", ValueError, 'budget must be like 200000000, "200MB", "1.5GiB" or "5%"'),
        ("-5MB", ValueError, "budget must be like"),
        ("1.2.3MB", ValueError, "budget must be like"),
        ("5 XB", ValueError, "the unit of a budget must be one of"),
        (-1, ValueError, "budget must be >= 0 bytes, got -1"),
        (1.5, ValueError, r"a share of exact state, in \(0, 1\], got 1.5"),
        (float("nan"), ValueError, "got nan"),
        (None, TypeError, "budget must be bytes, a share or a string, got None"),
        (True, TypeError, "got True"),
    ],
)
def test_a_budget_that_says_nothing_is_refused(budget, error, message):
    with pytest.raises(error, match=message):
        so.plan(LM1B, budget)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": 3}, "optimizer must be one of .*, got 3"),
        ({"optimizer": "Lion"}, "optimizer must be one of .*, got 'Lion'"),
        ({"tables": ["head"]}, r"tables must be trained parameters or their names, got \['head'\]"),
        (
            {"counts": {"head": [1]}},
            r"counts must be given for tables, which are .* got \['head'\]",
        ),
        ({"counts": {"softmax": np.ones(5)}}, "must be 793,471, one per row, got 5"),
        ({"ids_per_step": 0}, "ids_per_step must be >= 1, got 0"),
        ({"beta2": 2.0}, r"beta2, must be in \[0, 1\], got 2.0"),
        ({"zipf": -1.0}, "exponent must be finite and >= 0"),
        ({"granularity": "column"}, "granularity must be one of"),
        ({"finest": "exact"}, r"finest must be one of \['default', 'array'\], got 'exact'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        so.plan(LM1B, "1MB", **options)


def test_a_file_with_tables_that_look_up_nothing_is_refused(tmp_path):
    path = tmp_path / "shapes.toml"
    path.write_text('[[tables]]\nname = "words"\nshape = [1000, 8]\nids_per_step = 0\n')
    with pytest.raises(ValueError, match="ids_per_step must be >= 1, got 0"):
        so.plan(path, "10%")


# -- tables in files and on several ranks ------------------------------------------------------


def test_a_table_in_a_file_is_planned_with_its_bytes_on_disk_and_in_a_step(tmp_path):
    table = so.nn.FileEmbedding(tmp_path / "items.bin", 50_000, 256)
    model = nn.ModuleDict({"goods": table, "score": nn.Linear(256, 1)})
    plan = so.plan(model, "1MB", zipf=0, ids_per_step=100)
    goods = next(p for p in plan.parameters if p.name == "goods.weight")
    assert (goods.file_bytes, plan.file_bytes) == (table.nbytes, table.nbytes)
    assert goods.paged_bytes == 100 * 4096  # a row of 1,024 bytes is in one page
    assert goods.state_bytes <= 0.55 * 50_000
    assert "goods.weight: 51,200,000 bytes of weights in a file" in str(plan)
    assert so.plan(so.Adam(model.named_parameters()), 1.0, tables=[table.weight]).file_bytes


def test_rows_that_lie_across_pages_take_more_of_them(tmp_path):
    shapes = tmp_path / "shapes.toml"
    listed = '[[tables]]\nname = "t"\nshape = [1_000_000, 1536]\nzipf = 0.0\nin_file = true\n'
    shapes.write_text(listed, encoding="utf-8")
    (found,) = so.plan(shapes, "1MB", ids_per_step=1000).parameters
    # 6,144 bytes that begin at a multiple of 2,048 are always in two pages
    assert found.paged_bytes == pytest.approx(2 * 1000 * 4096, rel=0.001)


def test_a_table_in_a_file_is_not_divided_among_ranks(tmp_path):
    table = so.nn.FileEmbedding(tmp_path / "items.bin", 5_000, 4)
    with pytest.raises(ValueError, match=r"ranks must be 1 for a table in a file, .* got 2"):
        so.plan(table, 1.0, ranks=2)


def test_a_rank_holds_its_rows_of_arrays_and_the_whole_of_a_sketch():
    shapes = [("table", (1_000_001, 64)), ("small", (1_000, 64))]
    one, four = (so.plan(shapes, "10MB", finest="default", ranks=ranks) for ranks in (1, 4))
    table, small = four.parameters
    assert table.parameter_bytes == 250_001 * 64 * 4
    assert table.state_bytes == one.parameters[0].state_bytes
    assert table.sent_bytes == pytest.approx(2 * 3 / 4 * table.state_bytes, rel=0.001)
    # Processes sum the shares of columns as integers of 8 bytes.
    assert (small.state_bytes, small.sent_bytes) == (4 * 250 + 4 * 64, 1.5 * 8 * 64)
    assert small.exact_bytes == 2 * 4 * 250 * 64
    assert one.sent_bytes == 0
    assert "Bytes are those of one of 4 ranks" in str(four)


def test_a_storage_that_ranks_cannot_divide_is_refused():
    paper = so.Sketched(granularity="element", decay="paper")
    with pytest.raises(ValueError, match="the first moment must be one that ranks can divide"):
        so.plan([("table", (5_000, 8))], 1.0, first=paper, ranks=2)
