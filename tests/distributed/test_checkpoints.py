"""torch.distributed.checkpoint: state saved on some number of processes, loaded on another."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from language_models import LanguageModel, batches, train
from ranks import on_ranks, torchrun, world
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import sketchoptim as so

Wrap = Callable[[nn.Module], nn.Module]
WRAPS: dict[str, Wrap] = {
    "fsdp": fully_shard,
    "ddp": DistributedDataParallel,
    "one process": lambda model: model,
}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Run:
    """A model, wrapped, and its optimizer: tables lean, hidden layers in 8 bits or exact."""

    def __init__(self, wrap: str, rest: str = "exact") -> None:
        self.model = WRAPS[wrap](LanguageModel())
        groups = so.param_groups(self.model, memory="lean-0.1", rest=rest)
        self.optimizer = so.AdamW(groups, lr=0.01)

    def train(self, count: int, *, start: int = 0) -> "Run":
        train(self.model, self.optimizer, batches(count, start=start))
        return self

    def save(self, folder: Path, options: StateDictOptions | None = None) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path, options: StateDictOptions | None = None) -> "Run":
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        saved = {"model": model, "optimizer": optimizer}
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=options,
        )
        return self

    def numbers(self) -> dict[str, torch.Tensor]:
        """Weights and state, whole, by name."""
        found = {}
        state = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        names = [name.removeprefix("module.") for name, _ in self.model.named_parameters()]
        for name, parameter in zip(names, self.model.parameters(), strict=True):
            found[name] = whole(parameter.detach()).clone()
            for key, value in state.get(name, {}).items():
                if key == "digest":  # without checksums of what processes divide
                    continue
                found[f"{name}.{key}"] = whole(torch.as_tensor(value)).clone()
        return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []


@on_ranks(8)
def test_a_checkpoint_of_four_processes_loads_on_any_number_and_back(folder: Path):
    with world(4) as is_member:
        if is_member:
            run = Run("fsdp").train(3)
            run.save(folder / "four")
            numbers = run.numbers()
            if dist.get_rank() == 0:
                torch.save(numbers, folder / "numbers.pt")
    dist.barrier()
    expected = torch.load(folder / "numbers.pt")
    for count, wrap in ((8, "fsdp"), (2, "fsdp"), (2, "ddp"), (1, "one process"), (1, "fsdp")):
        place = folder / f"{count}-{wrap}"
        with world(count) as is_member:
            if is_member:
                run = Run(wrap).load(folder / "four")
                check_same(run.numbers(), expected)
                run.save(place)
        dist.barrier()
        with world(4) as is_member:
            if is_member:
                check_same(Run("fsdp").load(place).numbers(), expected)


@on_ranks(2)
def test_training_goes_on_bit_for_bit(folder: Path):
    for rest in ("exact", "8-bit"):
        unbroken = Run("fsdp", rest).train(6)
        Run("fsdp", rest).train(3).save(folder / rest)
        resumed = Run("fsdp", rest).load(folder / rest).train(3, start=3)
        check_same(resumed.numbers(), unbroken.numbers())


@on_ranks(2)
def test_flat_and_asynchronous_checkpoints_restore_the_same(folder: Path):
    run = Run("fsdp").train(3)
    run.save(folder / "flat", FLAT)
    check_same(Run("fsdp").load(folder / "flat", FLAT).numbers(), run.numbers())
    expected = run.numbers()
    model, optimizer = get_state_dict(run.model, run.optimizer)
    saving = dcp.async_save(
        {"model": model, "optimizer": optimizer},
        checkpoint_id=folder / "later",
        process_group=dist.new_group(),  # its collectives must not meet those of the training
    )
    run.train(1)
    saving.result()
    check_same(Run("fsdp").load(folder / "later").numbers(), expected)


@on_ranks(2)
def test_a_full_state_is_broadcast_from_the_first_process():
    run = Run("fsdp").train(3)
    state = get_optimizer_state_dict(
        run.model, run.optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    fresh = Run("fsdp")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(
        fresh.model,
        fresh.optimizer,
        optim_state_dict=state if dist.get_rank() == 0 else {},
        options=options,
    )
    found, expected = fresh.numbers(), run.numbers()
    states = {key for key in expected if key.count(".") > 1}
    check_same({key: found[key] for key in states}, {key: expected[key] for key in states})


@on_ranks(2)
def test_a_flipped_bit_in_the_files_of_a_sketch_is_refused_by_every_process(folder: Path):
    run = Run("fsdp").train(3)
    run.save(folder / "saved")
    if dist.get_rank() == 0:
        counters = next(it["second_counters"] for it in run.optimizer.state.values())
        needle = counters.numpy().tobytes()
        (file,) = [it for it in (folder / "saved").glob("*.distcp") if needle in it.read_bytes()]
        content = bytearray(file.read_bytes())
        content[content.index(needle) + 40] ^= 1
        file.write_bytes(content)
    dist.barrier()
    with pytest.raises(
        ValueError, match=r"second_counters of parameter embedding.weight of the .* is damaged"
    ):
        Run("fsdp").load(folder / "saved")


@on_ranks(2)
def test_the_state_of_one_process_loads_into_divided_tables_by_itself():
    one = Run("one process").train(3)
    many = Run("fsdp")
    many.optimizer.load_state_dict(one.optimizer.state_dict())
    found, expected = many.numbers(), one.numbers()
    states = {key for key in expected if key.count(".") > 1}
    check_same({key: found[key] for key in states}, {key: expected[key] for key in states})


@on_ranks(2)
def test_asking_for_state_counts_the_first_step_as_torch_does_and_changes_nothing_else():
    run = Run("fsdp")
    weights = {name: whole(it.detach()).clone() for name, it in run.model.named_parameters()}
    for _ in range(2):
        get_optimizer_state_dict(run.model, run.optimizer)
        assert all(state["step"] == 1 for state in run.optimizer.state.values())
    found = run.numbers()
    check_same({name: found[name] for name in weights}, weights)
    assert not any(found[key].any() for key in found if key.endswith(("_values", "_counters")))
    before = run.train(2).numbers()
    get_state_dict(run.model, run.optimizer)
    check_same(run.numbers(), before)


@on_ranks(2)
def test_a_sparse_table_whose_group_names_no_memory_is_not_made_exact():
    def built() -> tuple[nn.Module, so.Adam]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8000, 8, sparse=True), nn.Linear(8, 1))
        model = DistributedDataParallel(model)
        return model, so.Adam(model.parameters(), lr=0.01)

    def step(model: nn.Module, optimizer: so.Adam) -> None:
        optimizer.zero_grad()
        model(torch.arange(10) * 7).sum().backward()
        optimizer.step()

    def state_bytes(optimizer: so.Adam, table: torch.Tensor) -> int:
        return sum(it.nbytes for it in optimizer.state[table].values() if torch.is_tensor(it))

    model, optimizer = built()
    get_optimizer_state_dict(model, optimizer)  # makes exact state: the gradients are dense zeros
    step(model, optimizer)
    table = model.module[0].weight
    assert state_bytes(optimizer, table) < 8000
    fresh, loaded = built()
    get_optimizer_state_dict(fresh, loaded)
    loaded.load_state_dict(optimizer.state_dict())  # what is loaded decides
    fresh.load_state_dict(model.state_dict())
    assert state_bytes(loaded, fresh.module[0].weight) < 8000
    for it in ((model, optimizer), (fresh, loaded)):
        step(*it)
    assert torch.equal(fresh.module[0].weight, table)


def test_a_run_whose_rank_was_killed_ends_as_an_unbroken_one(tmp_path: Path):
    script = Path(__file__).parents[1] / "support" / "killed_run.py"
    weights = {}
    for name, killed_at in (("unbroken", []), ("killed", [5])):
        folder = tmp_path / name
        folder.mkdir()
        launch = torchrun(
            script,
            folder,
            8,
            *killed_at,
            ranks=2,
            logs=tmp_path / f"{name}-logs",
            options=["--max-restarts=1"],
            # Else the restarted ranks meet what the killed ones have left in the store.
            environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )
        assert launch.code == 0, launch.describe()
        weights[name] = torch.load(folder / "weights.pt")
        assert (folder / "started_at").read_text() == ("4" if killed_at else "0")
        survivor = "".join(path.read_text() for path in launch.logs.rglob("*0/stderr.log"))
        assert ("Check the logs of the remote worker" in survivor) == bool(killed_at)
    check_same(weights["killed"], weights["unbroken"])
