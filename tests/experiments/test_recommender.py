from dataclasses import replace

import pytest
import torch

from experiments.corpora import Interactions, Pairs, read_interactions
from experiments.methods import Method
from experiments.recommender import Recommender, RecommenderSettings, rank_items
from experiments.settings import TrainSettings
from experiments.tasks import ItemsOfUser
from experiments.training import Training


def pairs(*lines: tuple[int, int]) -> Pairs:
    users, items = torch.tensor(lines, dtype=torch.int64).reshape(-1, 2).T.contiguous()
    return Pairs(users, items)


def likes(choices: int, generator: torch.Generator) -> Pairs:
    """Users choose items of their own parity."""
    users = torch.arange(40).repeat_interleave(choices)
    items = 2 * torch.randint(15, users.shape, generator=generator) + users % 2
    return Pairs(users, items)


@pytest.fixture
def data() -> Interactions:
    generator = torch.Generator().manual_seed(0)
    return Interactions(40, 30, *(likes(count, generator) for count in (6, 2, 2)))


@pytest.fixture
def task(data) -> ItemsOfUser:
    return ItemsOfUser(data, RecommenderSettings(dim=8, samples=10, at=10))


def settings(**changes) -> TrainSettings:
    return TrainSettings(**{"table_lr": 0.03, "steps": 150, "batch": 32, **changes})


def oracle(data: Interactions) -> Recommender:
    """A model that ranks item i for user u by how near i is to u."""
    model = Recommender(data.users, data.items, RecommenderSettings(dim=2, at=2))
    for table in (model.users, model.items):
        angle = torch.arange(table.num_embeddings) / 10
        table.weight.data = torch.stack([angle.cos(), angle.sin()], dim=1)
    return model


def test_interactions_are_read_with_users_in_ascending_order(tmp_path):
    (tmp_path / "train.txt").write_text("1 4 5\n0 2\n")
    (tmp_path / "valid.txt").write_text("0\n1 3\n")
    (tmp_path / "test.txt").write_text("0 6\n")
    found = read_interactions(tmp_path)
    assert (found.users, found.items) == (2, 7)
    assert found.train.users.tolist() == [0, 1, 1]
    assert found.train.items.tolist() == [2, 4, 5]
    joined = found.with_valid_in_train()
    assert joined.train.items.tolist() == [2, 4, 5, 3]
    assert len(joined.valid) == 0


def test_a_line_that_is_no_list_of_numbers_is_refused(tmp_path):
    for part in ("train", "valid", "test"):
        (tmp_path / f"{part}.txt").write_text("0 1\nuser 2\n")
    with pytest.raises(ValueError, match=r"line 2 of .*train.txt must be the number of a user"):
        read_interactions(tmp_path)


def test_recall_and_ndcg_leave_known_items_and_users_without_items_out():
    data = Interactions(3, 6, pairs((0, 0)), pairs(), pairs((0, 2), (0, 5), (1, 1)))
    found = rank_items(oracle(data), data, data.test, data.train, limit=3)
    # user 0 is recommended 1 and 2, since it knows 0; user 1 is recommended 1 first
    second = 1 / torch.tensor(3.0).log2().item()
    assert found.recall == pytest.approx((1 / 2 + 1) / 2)
    assert found.ndcg == pytest.approx((second / (1 + second) + 1) / 2)


def test_a_limit_ranks_the_first_users_only():
    data = Interactions(3, 6, pairs(), pairs(), pairs((0, 0), (2, 5)))
    assert rank_items(oracle(data), data, data.test, data.train, limit=1).recall == 1.0


def test_a_layer_averages_the_neighbours_of_a_node_by_the_roots_of_degrees():
    chosen = pairs((0, 0), (0, 1), (1, 1))
    model = Recommender(2, 2, RecommenderSettings(dim=3, layers=1), chosen)
    edges = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    weights = edges / (edges.sum(1, keepdim=True) * edges.sum(0)).sqrt()
    rows, columns = model.users.weight, model.items.weight
    wanted = (rows + weights @ columns) / 2, (columns + weights.T @ rows) / 2
    for found, right in zip(model.vectors(), wanted, strict=True):
        torch.testing.assert_close(found, right)
    draws = torch.randn(2, 3)
    found, right = (
        torch.autograd.grad((users * draws).sum(), [rows, columns])
        for users in (model.vectors()[0], wanted[0])
    )
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("method", ["lean", "exact"])
def test_a_recommender_learns_which_items_belong_together(task, method, layers):
    task = ItemsOfUser(task.data, replace(task.settings, layers=layers))
    training = Training(task, settings(method=method))
    before = task.measure(training.model, "test", limit=40)
    list(training.steps())
    assert task.measure(training.model, "test", limit=40) < before - 10


def test_a_pass_shows_each_pair_at_most_once(task):
    drawn = [
        task.batch(number, batch=32, length=1) for number in range(task.batches(batch=32, length=1))
    ]
    users = torch.cat([users for users, _ in drawn])
    assert len(users) == 224
    assert (torch.bincount(users, minlength=40) <= 6).all()


def test_quality_is_measured_on_test_pairs_alone_when_validation_pairs_are_trained_on(task, data):
    joined = ItemsOfUser(data.with_valid_in_train(), task.settings)
    assert task.held_out == ("valid", "test")
    assert joined.held_out == ("test",)


def test_a_method_can_keep_its_tables_in_bfloat16(task):
    narrow = Method(name="lean-bf16", weights="bfloat16")
    training = Training(task, settings(method=narrow, steps=2))
    list(training.steps())
    assert {table.dtype for table in training.model.named_tables().values()} == {torch.bfloat16}
    assert training.run().table_state_bytes == 4 * (70 + 2 * 8)  # one number a row and one a column
