"""A first moment that holds too many rows a bucket warns."""

import warnings

import pytest
import torch
from gradients import sparse
from moment_runs import by_element

import sketchoptim as so


def run_at_load(memory, *, active, optimizer=so.Adam, steps=1, **options):
    """Steps on gradients that touch `active` rows of each of two parameters."""
    parameters = [torch.nn.Parameter(torch.zeros(200, 2)) for _ in range(2)]
    built = optimizer(parameters, memory=memory, **options)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = sparse(torch.arange(active), torch.ones(active, 2), (200, 2))
        built.step()


@pytest.mark.parametrize("decay", ["paper", "bucket", "linear"])
def test_a_crowded_first_moment_warns_once_for_each_parameter_and_says_what_to_do(decay):
    memory = so.Memory(by_element(decay=decay, width=4), so.Exact())
    with pytest.warns(UserWarning, match="active rows a bucket a step") as caught:
        run_at_load(memory, active=81, steps=3)
    assert len(caught) == 2
    message = str(caught[0].message)
    expected = (
        "the parameter of shape [200, 2] has 20 active rows a bucket a step in the first moment"
    )
    assert message.startswith(f"{expected}: above 20 ")
    assert message.endswith("Use a larger ratio, or Memory(first=None)")


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        (so.Memory(by_element(decay="paper", width=4), so.Exact()), {}),
        (so.Memory(by_element(decay="paper", width=1), so.Exact()), {"betas": (0.98, 0.999)}),
        (so.Memory(None, by_element(decay="paper", width=1)), {}),
        (so.Memory(so.Exact(), by_element(decay="paper", width=1)), {}),
    ],
    ids=["at the limit", "a longer memory", "no first moment", "an exact first moment"],
)
def test_up_to_the_limit_there_is_no_warning(memory, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run_at_load(memory, active=80, **options)


def test_momentum_warns_too():
    with pytest.warns(UserWarning, match="above 4 the collisions of a sketched first moment"):
        run_at_load("paper-mv", active=200, optimizer=so.SGD, momentum=0.5)


def test_a_warning_that_is_an_error_comes_after_a_whole_step():
    memory = so.Memory(by_element(decay="paper", width=4), so.Exact())
    parameters = [torch.nn.Parameter(torch.zeros(200, 2)) for _ in range(2)]
    optimizer = so.Adam([{"params": parameters, "memory": memory}])
    for parameter in parameters:
        parameter.grad = torch.ones(200, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning, match="active rows"):
            optimizer.step()
    for parameter in parameters:
        assert parameter.all()
        assert optimizer.state[parameter]["step"] == 1
