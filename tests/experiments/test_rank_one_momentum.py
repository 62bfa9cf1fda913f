import torch

from experiments.rank_one_momentum import RankOneMomentum


def sparse(ids, values):
    return torch.sparse_coo_tensor(torch.tensor([ids]), values, (6, 3), check_invariants=True)


def test_momentum_of_rank_one_is_kept_exactly_while_its_rows_are_proportional():
    columns = torch.tensor([1.0, 2.0, 3.0])
    table = torch.nn.Parameter(torch.zeros(6, 3))
    optimizer = RankOneMomentum([table], lr=0.5, momentum=0.9)
    momentum = torch.zeros(6, 3)
    expected = torch.zeros(6, 3)
    for ids in ([0, 2], [2, 5], [0, 5]):
        values = torch.tensor(ids)[:, None] * columns + columns
        table.grad = sparse(ids, values)
        optimizer.step()
        momentum = 0.9 * momentum + table.grad.to_dense()
        expected[ids] -= 0.5 * momentum[ids]
    torch.testing.assert_close(table.data, expected)


def test_a_momentum_whose_numbers_sum_to_zero_moves_nothing():
    table = torch.nn.Parameter(torch.zeros(6, 3))
    table.grad = sparse([1, 2], torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]))
    RankOneMomentum([table], lr=0.5).step()
    assert not table.any()
