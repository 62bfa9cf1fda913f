import numpy as np
import pytest
import torch

from experiments.corpora import NoisyViews, read_vectors


@pytest.fixture
def views():
    vectors = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    return NoisyViews(vectors, noise=0.5)


def test_a_batch_of_views_is_the_same_whenever_it_is_asked_for(views):
    first = views.batch("train", 3, 10)
    views.batch("train", 4, 10)
    again = views.batch("train", 3, 10)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_batches_and_parts_have_views_of_their_own(views):
    batches = [views.batch(*which, 10)[0] for which in (("train", 0), ("train", 1), ("valid", 0))]
    assert not torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


def test_views_have_length_one_and_lie_around_their_vectors(views):
    found, classes = views.batch("test", 0, 1000)
    assert torch.allclose(found.norm(dim=1), torch.ones(1000))
    centers = torch.nn.functional.normalize(views.vectors[classes], dim=1)
    cosines = (found * centers).sum(1)
    # noise of length 1/2 at right angles would give 1 / sqrt(1 + 1/4) = .894
    assert 0.85 < cosines.mean() < 0.93


def test_views_without_noise_are_the_vectors(views):
    found, classes = NoisyViews(views.vectors, noise=0.0).batch("train", 0, 5)
    assert torch.allclose(found, torch.nn.functional.normalize(views.vectors[classes], dim=1))


def test_an_array_is_read_as_it_is(tmp_path):
    array = np.arange(6, dtype=np.float16).reshape(3, 2)
    np.save(tmp_path / "vectors.npy", array)
    assert torch.equal(read_vectors(tmp_path / "vectors.npy"), torch.from_numpy(array).float())


@pytest.fixture
def faces(tmp_path):
    """100 examples of 5 classes: the first number of each names it."""
    embeddings = np.stack([np.arange(1, 101), np.ones(100)], axis=1).astype(np.float32)
    np.savez(tmp_path / "faces.npz", embeddings=embeddings, classes=np.arange(100) % 5)
    return read_vectors(tmp_path / "faces.npz")


def test_examples_are_divided_into_three_parts_that_share_none(faces):
    assert (faces.examples, faces.classes, faces.dim) == (80, 5, 2)
    parts = [faces.batch(part, 0, 80) for part in ("train", "valid", "test")]
    ratios = [(vectors[:, 0] / vectors[:, 1]).round().int() for vectors, _ in parts]
    assert [len(it) for it in ratios] == [80, 10, 10]
    assert torch.cat(ratios).sort().values.tolist() == list(range(1, 101))
    for numbers, (_, classes) in zip(ratios, parts, strict=True):
        assert torch.equal((numbers - 1) % 5, classes.int())


def test_a_pass_over_examples_shows_each_once_in_an_order_of_its_own(faces):
    first, second = (
        torch.cat([faces.batch("train", number, 32)[0] for number in range(start, start + 3)])
        for start in (0, 3)
    )
    assert not torch.equal(first, second)
    assert torch.equal(first[:, 0].sort().values, second[:, 0].sort().values)


def test_an_npz_file_without_its_arrays_gets_a_clear_error(tmp_path):
    np.savez(tmp_path / "faces.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match=r"must hold the arrays embeddings .* got x"):
        read_vectors(tmp_path / "faces.npz")
