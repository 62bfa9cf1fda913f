"""A whole model as groups: which parameters are tables, how they are kept, and what is said."""

import warnings

import pytest
import torch
from gradients import sparse
from torch import nn

import sketchoptim as so

ROWS = 1200
SOFTMAX = ["table.weight", "bias_table.weight"]
MACH = ["bodies.0.table.weight", "bodies.1.table.weight", "heads.0.weight", "heads.1.weight"]


class Tied(nn.Module):
    """A language model whose head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, ROWS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.norm(self.embedding(ids)))


class WithHead(nn.Module):
    """A model that tells its head as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(ROWS, 8)
        self.hidden = nn.Linear(8, 2 * ROWS)
        self.lm_head = nn.Linear(8, ROWS, bias=False)

    def get_output_embeddings(self):
        return self.lm_head


def bags():
    return nn.EmbeddingBag(ROWS, 4, mode="sum")


def mach():
    return so.nn.MACH(lambda: so.nn.BagEncoder(2000, 8), 8, 5000, ROWS, members=2)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: nn.Embedding(ROWS, 4), ["weight"]),
        (lambda: nn.Embedding(ROWS, 4, sparse=True), ["weight"]),
        (bags, ["weight"]),
        (lambda: nn.Embedding(999, 4), []),
        (lambda: nn.Linear(4, ROWS), []),
        (Tied, ["embedding.weight"]),
        (WithHead, ["tokens.weight", "lm_head.weight"]),
        (lambda: so.nn.SampledSoftmax(4, ROWS, samples=5, bias=True), SOFTMAX),
        (lambda: so.nn.LSHSoftmax(4, ROWS, bits=4, tables=2), ["table.weight"]),
        (mach, MACH),
    ],
)
def test_tables_are_known_by_the_type_of_their_module(make, names):
    model = make()
    found = so.find_tables(model)
    assert list(found) == names
    own = dict(model.named_parameters())
    assert all(found[name] is own[name] for name in names)


def test_a_head_that_is_a_plain_linear_is_named():
    model = nn.Sequential(nn.Embedding(ROWS, 4), nn.Linear(4, 50))
    assert list(so.find_tables(model, tables=["1.weight"])) == ["0.weight", "1.weight"]


def test_the_least_number_of_rows_is_an_option():
    assert list(so.find_tables(nn.Embedding(10, 4), min_rows=10)) == ["weight"]
    assert list(so.find_tables(nn.Embedding(ROWS, 4), min_rows=ROWS + 1)) == []


def test_frozen_tables_are_left_out():
    model = WithHead()
    model.tokens.weight.requires_grad_(False)
    assert list(so.find_tables(model)) == ["lm_head.weight"]
    named = [name for group in so.param_groups(model) for name, _ in group["params"]]
    assert named == ["lm_head.weight", "hidden.weight", "hidden.bias"]


def test_a_model_on_the_meta_device_has_its_tables():
    with torch.device("meta"):
        model = WithHead()
    assert list(so.find_tables(model)) == ["tokens.weight", "lm_head.weight"]
    assert "2 tables" in repr(so.param_groups(model))


def test_a_compiled_model_has_the_names_of_the_bare_one():
    model = torch.compile(WithHead(), backend="aot_eager")
    assert list(so.find_tables(model)) == ["tokens.weight", "lm_head.weight"]


def test_a_model_under_ddp_has_the_names_of_the_bare_one(mesh):
    model = nn.parallel.DistributedDataParallel(WithHead())
    assert list(so.find_tables(model)) == ["tokens.weight", "lm_head.weight"]


def test_a_sharded_model_has_its_tables_with_all_their_rows(mesh):
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(WithHead(), mesh=mesh)
    assert list(so.find_tables(model)) == ["tokens.weight", "lm_head.weight"]
    assert f"lm_head.weight  {ROWS:,} x 8" in repr(so.param_groups(model))


def test_factors_of_low_rank_that_an_adapter_adds_to_a_head_are_no_tables():
    model = WithHead()
    model.lm_head.weight.requires_grad_(False)
    model.lm_head.lora_B = nn.ModuleDict({"default": nn.Linear(2, ROWS, bias=False)})
    assert list(so.find_tables(model)) == ["tokens.weight"]


def test_every_trained_parameter_is_in_one_group():
    model = WithHead()
    groups = so.param_groups(model, no_decay=["bias"])
    names = [name for group in groups for name, _ in group["params"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_groups_have_their_memory_and_the_tables_their_options():
    tables, rest = so.param_groups(WithHead(), "row-wise", "8-bit", lr=0.5)
    assert tables["memory"] == so.Memory.of("row-wise")
    assert tables["lr"] == 0.5
    assert rest["memory"] == so.Memory.of("8-bit")
    assert "lr" not in rest


def test_named_parameters_do_not_decay():
    model = nn.ModuleDict({"embed": nn.Embedding(ROWS, 4), "body": nn.Linear(4, 4)})
    model["LayerNorm"] = nn.LayerNorm(4)
    optimizer = so.AdamW(so.param_groups(model, no_decay=["bias", "norm"]), weight_decay=0.5)
    decay = {
        name: group["weight_decay"]
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert decay == {
        "embed.weight": 0.5,
        "body.weight": 0.5,
        "body.bias": 0.0,
        "LayerNorm.weight": 0.0,
        "LayerNorm.bias": 0.0,
    }


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
def test_tables_are_compressed_whatever_their_gradients_are(is_sparse):
    model = nn.Sequential(nn.Embedding(ROWS, 8, sparse=is_sparse), nn.Linear(8, 3))
    optimizer = so.AdamW(so.param_groups(model))
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    report = {it.name: it for it in so.memory_report(optimizer).parameters}
    assert report["0.weight"].state_bytes == 4 * (ROWS + 8)
    assert report["1.weight"].state_bytes == report["1.weight"].exact_bytes


def test_a_tied_table_trains_and_is_compressed():
    model = Tied()
    optimizer = so.AdamW(so.param_groups(model), lr=0.05)
    ids = torch.arange(64)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids), ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    (table,) = (it for it in so.memory_report(optimizer).parameters if it.name.endswith("g.weight"))
    assert table.state_bytes == 4 * (ROWS + 8)


def test_what_is_printed_are_the_bytes_that_training_measures():
    model = WithHead()
    groups = so.param_groups(model, rest="8-bit")
    optimizer = so.Adam(groups)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is stepped by the reference kernels")
        optimizer.step()
    measured = {it.name: it.state_bytes for it in so.memory_report(optimizer).parameters}
    tables = sum(measured[name] for name in groups.tables)
    rest = sum(size for name, size in measured.items() if name not in groups.tables)
    first, *_, last = repr(groups).splitlines()
    assert f"{tables / 1000:.4g} KB of state instead of Adam's" in first
    assert last == f"2 other parameters: {rest / 1000:.4g} KB of state"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: so.find_tables([nn.Linear(2, 2)]), TypeError, "model must be an nn.Module"),
        (lambda: so.find_tables(Tied(), min_rows=0), ValueError, "min_rows must be >= 1"),
        (
            lambda: so.find_tables(Tied(), tables=["lm"]),
            ValueError,
            "must be names of trained parameters",
        ),
        (lambda: so.param_groups(nn.ReLU()), ValueError, "must have a parameter that is trained"),
        (lambda: so.param_groups(Tied(), "small"), ValueError, "memory must be a Memory or one of"),
        (lambda: so.param_groups(Tied(), memmory="lean"), TypeError, "did you mean 'memory'"),
        (lambda: so.param_groups(Tied(), min_row=10), TypeError, "did you mean 'min_rows'"),
        (lambda: so.param_groups(Tied(), xyzzy=10), TypeError, "takes no option 'xyzzy'$"),
    ],
)
def test_bad_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


# -- the warning about tables that stay exact -----------------------------------------------------


def step_once(optimizer, *parameters, is_sparse=False):
    for parameter in parameters:
        gradient = torch.ones_like(parameter)
        ids = torch.arange(3)
        parameter.grad = sparse(ids, gradient[:3], gradient.shape) if is_sparse else gradient
    optimizer.step()


def test_large_tables_with_dense_gradients_that_stay_exact_are_told_once():
    one, other = nn.Parameter(torch.zeros(ROWS, 4)), nn.Parameter(torch.zeros(1000, 2))
    optimizer = so.Adam([("embedding", one), ("head", other)])
    exact_bytes = 2 * 4 * (ROWS * 4 + 1000 * 2)
    with pytest.warns(UserWarning, match=r"so\.param_groups\(model\)") as told:
        step_once(optimizer, one, other)
    step_once(optimizer, one, other)  # where a warning would be an error
    (message,) = (str(it.message) for it in told)
    assert message.startswith(f"embedding [{ROWS}, 4], head [1000, 2] have at least 1,000 rows")
    assert f"{exact_bytes:,} bytes" in message


@pytest.mark.parametrize("shape", [(999, 4), (5000,)])
def test_small_tables_and_vectors_are_not_told_of(shape):
    parameter = nn.Parameter(torch.zeros(shape))
    step_once(so.Adam([parameter]), parameter)


def test_tables_whose_memory_was_asked_for_are_not_told_of():
    parameter = nn.Parameter(torch.zeros(ROWS, 4))
    step_once(so.Adam([{"params": [parameter], "memory": "lean"}]), parameter)
    step_once(so.Adam([{"params": [parameter], "memory": "exact"}]), parameter)
    step_once(so.Adam([parameter], memory="exact"), parameter)


def test_tables_with_sparse_gradients_are_not_told_of():
    parameter = nn.Parameter(torch.zeros(ROWS, 4))
    step_once(so.Adam([parameter]), parameter, is_sparse=True)


def test_an_optimizer_without_state_has_nothing_to_tell_of():
    parameter = nn.Parameter(torch.zeros(ROWS, 4))
    step_once(so.SGD([parameter]), parameter)
