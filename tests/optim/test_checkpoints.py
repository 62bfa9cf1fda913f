"""Contract 7: what `state_dict` holds, what loading restores, and what it refuses."""

import copy
import dataclasses
import functools
import io
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import tiny_runs
import torch
from tiny_runs import PLANS, PRESET_PLANS, ROWS, Plan, Run, batches, differences
from torch import Tensor

import sketchoptim as so

STEPS, SAVED_AFTER = 7, 3  # the plans that fold do so at 2 and 5, those that clean at 3 and 6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SKETCH = so.Sketched(ratio=0.5, granularity="element", fold_at=(40,))


def reloaded(*states: Any) -> Any:
    """What default `torch.load` makes of what `torch.save` wrote."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file)


@dataclass(frozen=True)
class Milestone:
    """An uninterrupted run: what was saved of it on the way, and the bits it came to."""

    checkpoint: bytes
    pickled: bytes
    bits_on_the_way: dict[str, Any]
    final_bits: dict[str, Any]


@functools.cache
def milestone(plan: Plan, dtype: torch.dtype = torch.float32) -> Milestone:
    run = Run.start(plan, dtype=dtype).train(batches(STEPS)[:SAVED_AFTER])
    file = io.BytesIO()
    torch.save((run.model.state_dict(), run.optimizer.state_dict()), file)
    pickled, bits = pickle.dumps((run.model, run.optimizer)), run.bits()
    run.train(batches(STEPS)[SAVED_AFTER:])
    return Milestone(file.getvalue(), pickled, bits, run.bits())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@tiny_runs.each(PLANS)
def test_training_resumed_from_a_file_continues_bit_for_bit(plan, dtype, tmp_path):
    run = milestone(plan, dtype)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(run.checkpoint)
    weights, state = torch.load(path)
    resumed = Run.start(plan, dtype=dtype, seed=99)
    resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(state)
    assert differences(resumed.bits(), run.bits_on_the_way) == []
    resumed.train(batches(STEPS)[SAVED_AFTER:])
    assert differences(resumed.bits(), run.final_bits) == []


def test_a_run_differs_from_one_that_was_not_resumed():
    """The comparison above can fail: dropping the loaded state is seen."""
    ids = batches(STEPS)
    plan = PLANS["Adam, lean"]
    whole = Run.start(plan).train(ids)
    forgetful = Run.start(plan).train(ids[:SAVED_AFTER])
    forgetful.optimizer = plan.build(forgetful.model)
    forgetful.train(ids[SAVED_AFTER:])
    assert "table.weight" in differences(forgetful.bits(), whole.bits())


@pytest.mark.parametrize("moment", ["before the save", "after it"])
def test_folding_and_cleaning_happen_on_both_sides_of_the_checkpoint(moment):
    """The plans that fold do so where the resumed runs above need them to."""
    plan = PLANS["Adam, linear, cleaned and folded"]
    steps = SAVED_AFTER if moment == "before the save" else STEPS
    width = Run.start(plan).train(batches(steps)).bits()["table.weight: second_table"].shape[1]
    assert width == (4 if moment == "before the save" else 2)


@tiny_runs.each(PRESET_PLANS)
def test_a_scheduler_resumes_with_the_optimizer(plan):
    ids = batches(STEPS)

    def start(seed: int) -> tuple[Run, Any]:
        run = Run.start(plan, seed=seed)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            run.optimizer, max_lr=0.1, total_steps=STEPS + 1
        )
        return run, schedule

    def train(run: Run, schedule: Any, some: list[Tensor]) -> None:
        for batch in some:
            run.train([batch])
            schedule.step()

    whole, schedule = start(0)
    train(whole, schedule, ids)
    part, schedule = start(0)
    train(part, schedule, ids[:SAVED_AFTER])
    saved = reloaded(part.model.state_dict(), part.optimizer.state_dict(), schedule.state_dict())
    resumed, schedule = start(99)
    for thing, state in zip((resumed.model, resumed.optimizer, schedule), saved, strict=True):
        thing.load_state_dict(state)
    train(resumed, schedule, ids[SAVED_AFTER:])
    assert differences(resumed.bits(), whole.bits()) == []


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(plain(key) and plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(plain(item) for item in value)
    return type(value) in (int, float, bool, str, type(None), Tensor)


@tiny_runs.each(PLANS)
def test_a_state_dict_holds_plain_tensors_numbers_and_strings(plan):
    _, optimizer = pickle.loads(milestone(plan).pickled)
    assert plain(optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@tiny_runs.each(PRESET_PLANS)
def test_only_exact_moments_follow_the_dtype_of_the_parameter(plan, dtype):
    saved = Run.start(plan).train(batches(SAVED_AFTER)).optimizer.state_dict()
    resumed = Run.start(plan, dtype=dtype)
    resumed.optimizer.load_state_dict(saved)
    weight = resumed.model.table.weight
    for key, value in saved["state"][0].items():
        if isinstance(value, Tensor):
            expected = dtype if key.endswith("_values") else value.dtype
            assert resumed.optimizer.state[weight][key].dtype == expected, key
    resumed.train(batches(1))


def storages_of(tree: Any) -> set[int]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, Tensor):
        return {tree.untyped_storage().data_ptr()}
    if isinstance(tree, list | tuple):
        return set().union(*map(storages_of, tree))
    return set()


@tiny_runs.each(PRESET_PLANS)
def test_loaded_state_shares_no_memory_with_the_dict_or_another_optimizer(plan):
    source = Run.start(plan).train(batches(SAVED_AFTER))
    saved = source.optimizer.state_dict()
    first, second = Run.start(plan), Run.start(plan)
    first.optimizer.load_state_dict(saved)
    second.optimizer.load_state_dict(saved)
    owners = [storages_of(saved), *(storages_of(dict(r.optimizer.state)) for r in (first, second))]
    assert sum(map(len, owners)) == len(set().union(*owners))


@tiny_runs.each(PRESET_PLANS)
def test_training_on_leaves_the_loaded_dict_as_it_was(plan):
    saved = Run.start(plan).train(batches(SAVED_AFTER)).optimizer.state_dict()
    saved = copy.deepcopy(saved)
    untouched = pickle.dumps(reloaded(saved)[0]["param_groups"])
    tables = copy.deepcopy(saved["state"])
    run = Run.start(plan)
    run.optimizer.load_state_dict(saved)
    run.train(batches(3))
    assert pickle.dumps(reloaded(saved)[0]["param_groups"]) == untouched
    assert all(differences(tables[key], saved["state"][key]) == [] for key in tables)


def test_one_dict_can_be_loaded_again_and_again():
    plan = PRESET_PLANS["lean"]
    source = Run.start(plan).train(batches(SAVED_AFTER))
    saved = copy.deepcopy(source.optimizer.state_dict())
    run = Run.start(plan)
    for _ in range(3):
        run.model.load_state_dict(source.model.state_dict())
        run.optimizer.load_state_dict(saved)
        assert differences(run.bits(), source.bits()) == []
        run.train(batches(2))


def test_loading_replaces_all_state_that_there_was():
    plan = PRESET_PLANS["lean"]
    saved = Run.start(plan).train(batches(2), uses_late=False).optimizer.state_dict()
    run = Run.start(plan).train(batches(5))
    assert run.optimizer.state[run.model.late.weight]
    run.optimizer.load_state_dict(saved)
    assert not run.optimizer.state.get(run.model.late.weight)
    assert run.optimizer.state[run.model.table.weight]["step"] == 2


@tiny_runs.each(PRESET_PLANS)
def test_state_that_was_saved_in_another_layout_continues_the_same(plan):
    """Kernels read memory, not strides."""
    run = Run.start(plan).train(batches(2))
    saved = copy.deepcopy(run.optimizer.state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 1:
                state[key] = value.transpose(0, -1).contiguous().transpose(0, -1)
    resumed = Run.start(plan)
    resumed.model.load_state_dict(run.model.state_dict())
    resumed.optimizer.load_state_dict(saved)
    assert differences(resumed.train(batches(2)).bits(), run.train(batches(2)).bits()) == []


@tiny_runs.each(PLANS)
def test_a_table_without_a_gradient_before_the_save_starts_the_same_after_it(plan):
    run = Run.start(plan).train(batches(2), uses_late=False)
    weights, state = reloaded(run.model.state_dict(), run.optimizer.state_dict())
    resumed = Run.start(plan, seed=99)
    resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(state)
    assert not resumed.optimizer.state.get(resumed.model.late.weight)
    assert differences(resumed.train(batches(2)).bits(), run.train(batches(2)).bits()) == []


def test_a_checkpoint_made_before_the_first_step_loads():
    plan = PRESET_PLANS["lean"]
    fresh = Run.start(plan)
    (saved,) = reloaded(fresh.optimizer.state_dict())
    run = Run.start(plan)
    run.optimizer.load_state_dict(saved)
    assert differences(run.train(batches(3)).bits(), fresh.train(batches(3)).bits()) == []


def test_the_count_of_skipped_steps_is_saved():
    plan = Plan(so.Adam, "lean", {"nonfinite": "skip"})
    run = Run.start(plan).train(batches(2))
    run.backward(batches(1)[0])
    run.model.table.weight.grad._values().fill_(float("nan"))
    run.optimizer.step()
    (saved,) = reloaded(run.optimizer.state_dict())
    resumed = Run.start(plan)
    resumed.optimizer.load_state_dict(saved)
    assert resumed.optimizer.state[resumed.model.table.weight]["skipped"] == 1


def test_names_of_parameters_are_kept():
    model = tiny_runs.TinyModel()
    optimizer = so.Adam(model.named_parameters())
    (saved,) = reloaded(optimizer.state_dict())
    expected = ["table.weight", "late.weight", "head.weight", "head.bias"]
    assert saved["param_groups"][0]["param_names"] == expected
    named, nameless = so.Adam(model.named_parameters()), so.Adam(model.parameters())
    for other in (named, nameless):
        other.load_state_dict(saved)
        assert set(other.param_groups[0]["params"]) == set(model.parameters())
    assert named.param_groups[0]["param_names"] == expected


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@tiny_runs.each(PLANS)
def test_a_copied_run_continues_like_the_original(plan, copied):
    run = milestone(plan)
    original = pickle.loads(run.pickled)
    twin = Run(*copied(original))
    assert not storages_of(dict(twin.optimizer.state)) & storages_of(dict(original[1].state))
    assert differences(twin.bits(), run.bits_on_the_way) == []
    twin.train(batches(STEPS)[SAVED_AFTER:])
    assert differences(twin.bits(), run.final_bits) == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_optimizer_loads_checkpoints(copied):
    run = Run.start(PRESET_PLANS["lean"]).train(batches(2))
    saved = copy.deepcopy(run.optimizer.state_dict())
    twin = Run(*copied((run.model, run.optimizer))).train(batches(2))
    twin.optimizer.load_state_dict(saved)
    assert twin.optimizer.state[twin.model.table.weight]["step"] == 2


# -- another device ------------------------------------------------------------------------------


@tiny_runs.each(PRESET_PLANS)
def test_state_goes_to_the_device_of_the_parameter(plan):
    """The meta device stands for any other: what has to be there is there, and no more."""
    saved = Run.start(plan).train(batches(SAVED_AFTER)).optimizer.state_dict()
    run = Run.start(plan, device="meta")
    run.optimizer.load_state_dict(saved)
    for key, value in run.optimizer.state[run.model.table.weight].items():
        if isinstance(value, Tensor):
            on_host = key in ("step", "shape") or key.endswith(("_scale", "_rounds"))
            assert value.device.type == ("cpu" if on_host else "meta"), key
            assert value.shape == saved["state"][0][key].shape, key


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@tiny_runs.each(PRESET_PLANS)
def test_a_checkpoint_moves_between_cpu_and_cuda(plan):
    part = Run.start(plan).train(batches(SAVED_AFTER))
    there = Run.start(plan, device="cuda")
    there.model.load_state_dict(part.model.state_dict())
    there.optimizer.load_state_dict(part.optimizer.state_dict())
    there.train(ids.cuda() for ids in batches(2))
    back = Run.start(plan)
    back.model.load_state_dict(there.model.state_dict())
    back.optimizer.load_state_dict(there.optimizer.state_dict())
    back.train(batches(1))
    part.train(batches(2)).train(batches(1))
    torch.testing.assert_close(back.model.table.weight, part.model.table.weight)


# -- hooks ---------------------------------------------------------------------------------------


def test_hooks_on_saving_see_what_is_saved_and_can_change_it():
    run = Run.start(PRESET_PLANS["paper-mv"]).train(batches(2))
    seen: list[Any] = []

    def post(optimizer, state):
        seen.append(plain(state))
        return {**state, "epoch": 3}

    run.optimizer.register_state_dict_pre_hook(lambda optimizer: seen.append(optimizer))
    run.optimizer.register_state_dict_post_hook(post)
    assert run.optimizer.state_dict()["epoch"] == 3
    assert seen == [run.optimizer, True]
    assert run.optimizer.state_dict()["epoch"] == 3
    assert seen == [run.optimizer, True] * 2


def test_hooks_on_loading_see_the_dict_and_then_the_restored_state():
    plan = PRESET_PLANS["lean"]
    saved = Run.start(plan).train(batches(2)).optimizer.state_dict()
    run = Run.start(plan, dtype=torch.bfloat16)
    seen: list[Any] = []
    weight = run.model.table.weight

    def post(optimizer):
        seen.append(optimizer.state[weight]["second_table"].dtype)
        seen.append(optimizer.param_groups[0]["memory"] == so.storage.PRESETS["lean"])

    run.optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(plain(state)))
    run.optimizer.register_load_state_dict_post_hook(post)
    run.optimizer.load_state_dict(saved)
    assert seen == [True, torch.float32, True]


def test_a_hook_on_loading_may_replace_the_dict():
    """As for a checkpoint of an older version, which a hook brings up to date."""
    plan = PRESET_PLANS["lean"]
    saved = Run.start(plan).train(batches(2)).optimizer.state_dict()
    run = Run.start(plan)
    run.optimizer.register_load_state_dict_pre_hook(lambda _, old: old["optimizer"])
    run.optimizer.load_state_dict({"optimizer": saved})
    assert run.optimizer.state[run.model.table.weight]["step"] == 2


def test_a_refused_load_leaves_no_hook_behind():
    run = Run.start(PRESET_PLANS["lean"]).train(batches(2))
    other = Run.start(PRESET_PLANS["row-wise"]).train(batches(2))
    with pytest.raises(ValueError, match="differs"):
        run.optimizer.load_state_dict(other.optimizer.state_dict())
    before = run.bits()
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    assert differences(run.bits(), before) == []


# -- what does not fit ---------------------------------------------------------------------------


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
        r"second\.kind is Sketched here and RankOne in the checkpoint",
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
    refuse(run, theirs.state_dict(), r"lacks the options \[.*'memory'.*another kind of optimizer")


def test_another_number_of_groups_is_refused():
    run = Run.start(adam()).train(batches(2))
    fewer = run.optimizer.state_dict()
    fewer["param_groups"] = fewer["param_groups"][:2]
    refuse(run, fewer, "different number of parameter groups")


def test_another_number_of_parameters_in_a_group_is_refused():
    run = Run.start(adam()).train(batches(2))
    saved = run.optimizer.state_dict()
    saved["param_groups"][0]["params"].append(4)
    refuse(run, saved, "doesn't match the size")


@pytest.mark.parametrize("shape", [(ROWS + 1, 6), (ROWS, 7), (ROWS, 3, 2), (ROWS,)], ids=str)
@pytest.mark.parametrize("memory", so.storage.PRESETS)
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
    with pytest.raises(
        ValueError, match=rf"has shape \[60, 6\] here and {found} in the checkpoint"
    ):
        ours.load_state_dict(other.state_dict())
    assert differences(tiny_runs.bits(ours, [("p", parameter)]), before) == []


def test_whether_dense_gradients_are_compressed_must_be_the_same():
    model = tiny_runs.TinyModel()
    compressed = so.Adam([{"params": list(model.parameters()), "memory": "lean"}])
    default = so.Adam(model.parameters(), memory="lean")
    with pytest.raises(ValueError, match="compress_dense is False here and True in the checkpoint"):
        default.load_state_dict(compressed.state_dict())


def test_a_state_that_lacks_a_tensor_is_refused():
    run = Run.start(adam()).train(batches(2))
    saved = copy.deepcopy(run.optimizer.state_dict())
    del saved["state"][0]["second_table"]
    refuse(run, saved, "parameter 0 of the checkpoint has no second_table")


def test_a_table_of_a_width_that_no_fold_gives_is_refused():
    run = Run.start(adam()).train(batches(2))
    saved = copy.deepcopy(run.optimizer.state_dict())
    saved["state"][0]["second_table"] = torch.zeros(3, 3, 6)
    refuse(run, saved, r"second_table of parameter 0 has shape \[3, 3, 6\] in the checkpoint")


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [("lr", float("nan"), ValueError), ("betas", (0.9, 1.5), ValueError), ("eps", "x", TypeError)],
)
def test_options_in_a_checkpoint_are_checked_as_a_group_is(option, value, error):
    run = Run.start(adam()).train(batches(2))
    saved = run.optimizer.state_dict()
    saved["param_groups"][1][option] = value
    refuse(run, saved, f"group 1 of the checkpoint: {option}", error)
