"""What a plan is to its user: groups, JSON, and a table that explains it."""

import pytest
import torch
from torch import nn

import sketchoptim as so


def tied(rows: int = 3000) -> nn.Module:
    model = nn.ModuleDict(
        {"table": nn.Embedding(rows, 4, sparse=True), "output": nn.Linear(4, rows, bias=True)}
    )
    model["output"].weight = model["table"].weight
    return model


@pytest.fixture
def plan():
    return so.plan(tied(), "26KB")


def test_groups_hold_every_parameter_once_with_its_memory(plan):
    model = tied()
    dense, table = plan.param_groups(model)
    assert dense == {"params": [("output.bias", model["output"].bias)]}
    assert table["params"] == [("table.weight", model["table"].weight)]
    assert table["memory"] == plan.memory["table.weight"]


def test_tables_of_one_memory_share_a_group():
    model = nn.ModuleList(nn.Embedding(500, 4, sparse=True) for _ in range(3))
    groups = so.plan(model, 1.0).param_groups(model)
    assert [len(group["params"]) for group in groups] == [3]


def test_a_model_with_other_parameters_is_refused(plan):
    lists = r"missing in the model: \['output.bias', 'table.weight'\], not in the plan: \['0.bias'"
    with pytest.raises(ValueError, match=f"{lists}, '0.weight'.; pass the model that was planned"):
        plan.param_groups(nn.Sequential(nn.Linear(3, 4)))


WRAPPERS = {
    "compiled": torch.compile,
    "parallel": nn.DataParallel,
    "compiled in parallel": lambda model: nn.DataParallel(torch.compile(model)),
    "parallel, compiled": lambda model: torch.compile(nn.DataParallel(model)),
    "compiled inside": lambda model: nn.ModuleDict(
        {"table": model["table"], "output": torch.compile(model["output"])}
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_model_has_the_plan_and_the_groups_of_the_model(plan, wrap):
    model = tied()
    assert plan.param_groups(wrap(model)) == plan.param_groups(model)
    assert so.plan(wrap(model), "26KB") == plan


def test_a_model_with_other_shapes_is_refused(plan):
    with pytest.raises(ValueError, match=r"table.weight must have shape \(3000, 4\) .* plan again"):
        plan.param_groups(tied(rows=2000))


def test_json_and_back_is_the_same_plan(plan, tmp_path):
    assert so.planning.Plan.from_json(plan.to_json()) == plan
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    assert so.planning.Plan.from_json(path) == plan
    assert so.planning.Plan.from_json(str(path)) == plan


def test_the_printed_plan_explains_every_parameter():
    shapes = [("words", (5000, 8)), ("users", (50, 8)), ("bias", (8,))]
    lines = str(so.plan(shapes, "3KB")).splitlines()
    words, users, bias, total = lines[1:5]
    assert "v by row x column, 3 x " in words
    assert "rows a bucket" in words
    assert "one a row x one a column" in users
    assert "no collisions, decays when touched" in users
    assert "dense gradients" in bias
    assert "of 3,000 allowed" in total
    assert "|estimate - v| / |v|" in lines[5] + lines[6]


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (so.Exact(), "m exact, v "),
        (so.TopSingular(), "m top singular, v "),
        (so.Sketched(granularity="element", width=50), "m by element, 3 x 50, v "),
        (so.Sketched(granularity="element", ratio=0.25), "m by element, ratio 0.25, v "),
    ],
)
def test_a_first_moment_is_described(first, words):
    assert words in str(so.plan([("words", (5000, 8))], 1.0, first=first))


def test_the_verdict_of_a_table_follows_from_its_predicted_error():
    model = nn.ModuleDict(
        {name: nn.Embedding(5_000, 16, sparse=True) for name in ("words", "users")}
    )
    found = so.plan(model, "10KB", zipf={"words.weight": 0.9, "users.weight": 0.0})
    words, users = found.parameters
    assert (words.verdict, users.verdict) == ("fine", "too narrow: error above 1")
    assert str(found).splitlines()[2].endswith("  too narrow: error above 1")
    assert [it.verdict for it in so.plan(model, 1.0, finest="array").parameters] == ["", ""]
