"""Contract 7: what does not fit is refused, with the difference, and changes nothing."""

import copy
import dataclasses
from typing import Any

import pytest
import tiny_runs
import torch
from tiny_runs import ROWS, Plan, Run, batches, differences

import sketchoptim as so

SKETCH = so.Sketched(ratio=0.5, granularity="element", fold_at=(40,))


def adam(**options: Any) -> Plan:
    return Plan(so.Adam, so.Memory(second=dataclasses.replace(SKETCH, **options)))


REFUSED = {
    "ratio": (adam(ratio=0.25), r"second\.ratio is 0\.5 here and 0\.25 in the checkpoint"),
    "width": (adam(ratio=None, width=4), r"second\.width is None here and 4 in the checkpoint"),
    "depth": (adam(depth=2), r"second\.depth is 3 here and 2 in the checkpoint"),
    "dtype": (adam(dtype=torch.bfloat16), r"second\.dtype is float32 here and bfloat16 in"),
    "seed": (adam(seed=7), r"second\.seed is 0 here and 7 in the checkpoint"),
    "granularity": (adam(granularity="row"), r"second\.granularity is element here and row in"),
    "decay": (adam(decay="paper"), r"second\.decay is linear here and paper in the checkpoint"),
    "conservative": (adam(conservative=True), r"second\.conservative is False here and True in"),
    "folding": (adam(fold_at=(50,)), r"second\.fold_at is \[40\] here and \[50\] in"),
    "cleaning": (
        adam(clean_every=5, clean_by=0.5),
        r"clean_by is None here and 0\.5 in the checkpoint; .*clean_every is None here and 5 in",
    ),
    "clip": (
        Plan(so.Adam, so.Memory(second=SKETCH, clip=2.0)),
        r"clip is None here and 2\.0 in the checkpoint",
    ),
    "first moment": (
        Plan(so.Adam, so.Memory(first=so.Exact(), second=SKETCH)),
        r"first\.kind is None here and Exact in the checkpoint",
    ),
    "another storage": (
        Plan(so.Adam, "rank-one"),
        r"checkpoint's: second\.kind is Sketched here and RankOne in the checkpoint\. Build",
    ),
    "AdamW": (Plan(so.AdamW, adam().memory), "decoupled_weight_decay must be False .* see AdamW"),
    "RMSprop": (Plan(so.RMSprop, adam().memory), r"lacks the options \['betas'.*another kind"),
    "Adagrad": (Plan(so.Adagrad, adam().memory), r"lacks the options \['betas'.*another kind"),
    "SGD": (Plan(so.SGD, so.Memory(first=SKETCH)), r"lacks the options \['betas'.*another kind"),
}


def refuse(run: Run, saved: dict[str, Any], pattern: str, error: type = ValueError) -> None:
    before = run.bits()
    with pytest.raises(error, match=pattern):
        run.optimizer.load_state_dict(saved)
    assert differences(run.bits(), before) == []
    run.train(batches(1))  # and it still works


@pytest.mark.parametrize(("plan", "pattern"), REFUSED.values(), ids=REFUSED.keys())
def test_another_plan_is_refused_with_the_difference_and_nothing_changes(plan, pattern):
    saved = Run.start(plan).train(batches(2)).optimizer.state_dict()
    refuse(Run.start(adam()).train(batches(3)), saved, pattern)


@pytest.mark.parametrize("name", ["Adam", "SparseAdam", "SGD", "Adagrad"])
def test_a_checkpoint_of_torch_optim_is_refused(name):
    run = Run.start(adam()).train(batches(2))
    twin = Run.start(adam())
    sparse = [twin.model.table.weight, twin.model.late.weight]
    parameters = sparse if name == "SparseAdam" else [twin.model.head.weight]
    groups = [{"params": parameters}, {"params": []}, {"params": []}]
    theirs = getattr(torch.optim, name)(groups, lr=0.1)
    twin.backward(batches(1)[0])
    theirs.step()
    pattern = r"lacks the options \[.*'memory'.*another kind of optimizer; .*from_torch\(\) makes"
    refuse(run, theirs.state_dict(), pattern)


def test_another_number_of_groups_is_refused():
    run = Run.start(adam()).train(batches(2))
    fewer = run.optimizer.state_dict()
    fewer["param_groups"] = fewer["param_groups"][:2]
    refuse(run, fewer, "checkpoint must have 3 parameter groups, got 2; build the optimizer with")


def test_another_number_of_parameters_in_a_group_is_refused():
    run = Run.start(adam()).train(batches(2))
    saved = run.optimizer.state_dict()
    saved["param_groups"][0]["params"].append(4)
    refuse(run, saved, "group 0 of the checkpoint must have 2 parameters, got 3; load it into")


@pytest.mark.parametrize("shape", [(ROWS + 1, 6), (ROWS, 7), (ROWS, 3, 2), (ROWS,)], ids=str)
@pytest.mark.parametrize("memory", ["lean-0.1", "exact"])
def test_another_shape_of_a_parameter_is_refused(memory, shape):
    def trained(*shape: int) -> so.Adam:
        parameter = torch.nn.Parameter(torch.ones(shape))
        optimizer = so.Adam([parameter], memory=memory)
        parameter.grad = (
            torch.ones(2, *shape[1:]).to_sparse(1).sparse_resize_(shape, 1, len(shape) - 1)
        )
        optimizer.step()
        return optimizer

    ours, other = trained(ROWS, 6), trained(*shape)
    parameter = ours.param_groups[0]["params"][0]
    before = tiny_runs.bits(ours, [("p", parameter)])
    found = str(list(shape)).replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(ValueError, match=rf"must be for shape \[60, 6\], got {found}; load what"):
        ours.load_state_dict(other.state_dict())
    assert differences(tiny_runs.bits(ours, [("p", parameter)]), before) == []


def test_whether_dense_gradients_are_compressed_must_be_the_same():
    model = tiny_runs.TinyModel()
    compressed = so.Adam([{"params": list(model.parameters()), "memory": "lean-0.1"}])
    default = so.Adam(model.parameters(), memory="lean-0.1")
    with pytest.raises(ValueError, match="compress is sparse here and all in the checkpoint"):
        default.load_state_dict(compressed.state_dict())


@pytest.mark.parametrize("start", [torch.ones(3), torch.ones(()).double(), "x"], ids=str)
def test_what_a_table_started_from_must_be_a_number(start):
    plan = Plan(so.Adagrad, "lean-0.1", {"initial_accumulator_value": 0.5})
    run = Run.start(plan).train(batches(2))
    saved = copy.deepcopy(run.optimizer.state_dict())
    saved["state"][0]["second_start"] = start
    refuse(run, saved, "second moment of parameter 0 of the checkpoint .*, but its second_start")


# Steps that are no counts, and missing and foreign keys, are in `test_damaged_checkpoints.py`.
BAD_STATE = {
    "no word on compression": (
        "is_compressed",
        "yes",
        TypeError,
        "is_compressed of parameter 0 of the checkpoint must be True or False, got 'yes'",
    ),
    "another word on compression": (
        "is_compressed",
        False,
        ValueError,
        r"first moment of .* must be kept in Exact\(\), but it has nothing, not .'first_values'",
    ),
    "no shape": ("shape", 60, ValueError, r"must be for shape \[60, 6\], got 60"),
    "counters that were cast": (
        "second_counters",
        torch.zeros(3, 10, 6, dtype=torch.float64),
        ValueError,
        r"its second_counters is torch.float64, not torch.float32; load what .* gave, uncast",
    ),
    "a width that no fold gives": (
        "second_counters",
        torch.zeros(3, 3, 6),
        ValueError,
        r"but its second_counters has shape \[3, 3, 6\], not \[3, 10, 6\]",
    ),
}


@pytest.mark.parametrize(("key", "value", "error", "pattern"), BAD_STATE.values(), ids=BAD_STATE)
def test_a_state_that_no_step_could_use_is_refused(key, value, error, pattern):
    run = Run.start(adam()).train(batches(2))
    saved = copy.deepcopy(run.optimizer.state_dict())
    saved["state"][0][key] = value
    refuse(run, saved, pattern, error)


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [("lr", float("nan"), ValueError), ("betas", (0.9, 1.5), ValueError), ("eps", "x", TypeError)],
)
def test_options_in_a_checkpoint_are_checked_as_a_group_is(option, value, error):
    run = Run.start(adam()).train(batches(2))
    saved = run.optimizer.state_dict()
    saved["param_groups"][1][option] = value
    refuse(run, saved, f"group 1 of the checkpoint: {option}", error)


@pytest.mark.parametrize(
    ("memory", "pattern", "error"),
    [
        ({"second": {"kind": "Sketched", "novel": 1}}, r"got \['novel'\]; use the", ValueError),
        ("lean-0.1", "memory must be a dict", TypeError),
    ],
    ids=["of a later version", "a name"],
)
def test_a_memory_that_cannot_be_read_is_refused_with_its_group(memory, pattern, error):
    run = Run.start(adam()).train(batches(2))
    saved = run.optimizer.state_dict()
    saved["param_groups"][1]["memory"] = memory
    refuse(run, saved, f"group 1 of the checkpoint: .*{pattern}", error)
