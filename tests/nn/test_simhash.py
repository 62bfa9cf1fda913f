"""SimHash tables: which vectors share a bucket, how often, and within a budget."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seeds import generator

from sketchoptim.nn import _simhash
from sketchoptim.nn._simhash import SimHashIndex, collision_probability


def index_of(vectors, *, bits, tables, seed=0, chunk=7):
    planes = SimHashIndex.planes(vectors.shape[1], bits=bits, tables=tables, seed=seed)
    return SimHashIndex.build(vectors.split(chunk), planes)


def naive_matches(vectors, queries, planes):
    """For each query a list of ids, once for each table in which all signs agree."""
    found = []
    for query in queries:
        met = []
        for table in range(planes.shape[1]):
            sides = [(query @ plane > 0).item() for plane in planes[:, table].T]
            for number, vector in enumerate(vectors):
                if [(vector @ plane > 0).item() for plane in planes[:, table].T] == sides:
                    met.append(number)
        found.append(met)
    return found


@given(
    n=st.integers(1, 25),
    dim=st.integers(1, 4),
    bits=st.integers(1, 5),
    tables=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_vectors_are_found_when_all_signs_of_a_table_agree(n, dim, bits, tables, seed):
    vectors = torch.randn(n, dim, generator=generator(seed))
    queries = torch.randn(3, dim, generator=generator(seed + 1))
    index = index_of(vectors, bits=bits, tables=tables, seed=seed)
    found = index.find(queries, budget=n)
    expected = [sorted(set(met)) for met in naive_matches(vectors, queries, index.normals)]
    assert [found.ids[found.query == q].tolist() for q in range(3)] == expected
    assert found.matches.tolist() == [len(ids) for ids in expected]


def test_members_are_all_ids_in_every_table():
    index = index_of(torch.randn(50, 6, generator=generator(0)), bits=3, tables=4)
    assert index.members.dtype == torch.int32
    assert index.members.reshape(4, 50).sort(1).values.tolist() == [list(range(50))] * 4
    assert index.starts[0] == 0
    assert index.starts[:: 2**3].tolist() == [0, 50, 100, 150, 200]


@pytest.mark.parametrize("degrees", [10, 45, 80, 120])
def test_vectors_collide_as_often_as_their_angle_says(degrees):
    angle = math.radians(degrees)
    query = torch.tensor([[1.0, 0.0]])
    vector = torch.tensor([[math.cos(angle), math.sin(angle)]])
    rounds, bits, tables = 1_000, 3, 4
    met = sum(
        index_of(vector, bits=bits, tables=tables, seed=seed).find(query, budget=1).matches.item()
        for seed in range(rounds)
    )
    expected = collision_probability(torch.tensor(math.cos(angle)), bits=bits, tables=tables).item()
    assert expected == pytest.approx(1 - (1 - (1 - degrees / 180) ** bits) ** tables, rel=1e-5)
    assert abs(met / rounds - expected) < 4.5 * math.sqrt(expected * (1 - expected) / rounds)


@pytest.mark.parametrize(
    ("cosine", "expected"),
    [(-1.0, 0.0), (-0.999, 16 * (1 - math.acos(-0.999) / math.pi) ** 15), (1.0, 1.0), (1.1, 1.0)],
)
def test_collision_probabilities_keep_their_digits_at_the_ends(cosine, expected):
    found = collision_probability(torch.tensor(cosine, dtype=torch.float64), bits=15, tables=16)
    assert found.item() == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("at_random", [False, True])
def test_no_query_finds_more_than_its_budget(at_random):
    vectors = torch.randn(400, 6, generator=generator(0))
    queries = torch.randn(30, 6, generator=generator(1))
    index = index_of(vectors, bits=2, tables=5)
    found = index.find(queries, budget=20, at_random=at_random, generator=generator(2))
    everything = index.find(queries, budget=400)
    assert (found.query.bincount(minlength=30) == 20).all()
    kept = set(zip(found.query.tolist(), found.ids.tolist(), strict=True))
    assert len(kept) == 600
    assert kept <= set(zip(everything.query.tolist(), everything.ids.tolist(), strict=True))


def test_a_small_budget_goes_to_ids_that_match_in_most_tables():
    vectors = torch.randn(100, 3, generator=generator(0))
    queries = vectors[:10]
    index = index_of(vectors, bits=6, tables=12)
    found = index.find(queries, budget=25, generator=generator(1))
    assert (index.starts.diff() <= 25).all()  # so that no bucket hides any of its ids
    assert (found.matches > 25).all()
    for query, met in enumerate(naive_matches(vectors, queries, index.normals)):
        taken = found.ids[found.query == query].tolist()
        least = min(met.count(i) for i in taken)
        assert len(taken) == 25
        assert least >= max(met.count(i) for i in set(met) - set(taken))


def test_a_large_bucket_is_sampled_evenly():
    vectors = torch.ones(10, 3)
    index = index_of(vectors, bits=4, tables=1)
    seen = torch.zeros(10)
    for seed in range(2_000):
        seen[index.find(vectors[:1], budget=3, generator=generator(seed)).ids] += 1
    assert ((seen / 2_000 - 0.3).abs() < 4.5 * math.sqrt(0.3 * 0.7 / 2_000)).all()


def test_queries_in_chunks_find_the_same(monkeypatch):
    vectors = torch.randn(200, 6, generator=generator(0))
    queries = torch.randn(30, 6, generator=generator(1))
    index = index_of(vectors, bits=4, tables=5)
    whole = index.find(queries, budget=200)
    monkeypatch.setattr(_simhash, "_PAIRS_AT_ONCE", 7 * 5 * 200)
    for ours, theirs in zip(index.find(queries, budget=200), whole, strict=True):
        assert torch.equal(ours, theirs)


def test_no_queries_find_nothing():
    found = index_of(torch.randn(5, 2), bits=2, tables=2).find(torch.empty(0, 2), budget=3)
    assert [part.numel() for part in found] == [0, 0, 0]


def test_nan_and_zero_queries_fall_into_the_bucket_below_all_planes():
    index = index_of(torch.randn(50, 2, generator=generator(0)), bits=2, tables=3)
    queries = torch.tensor([[math.nan, 1.0], [0.0, 0.0]])
    found = index.find(queries, budget=50)
    first, second = (found.ids[found.query == query].tolist() for query in range(2))
    assert first == second
