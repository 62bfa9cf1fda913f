import pytest
import torch

from sketchoptim.nn import SampledSoftmax


@pytest.fixture
def problem():
    """A head with a bias, hidden vectors and labels, in float64."""
    torch.manual_seed(0)
    head = SampledSoftmax(8, 40, samples=20, bias=True).double()
    with torch.no_grad():
        head.bias.normal_()
    return head, torch.randn(6, 8, dtype=torch.float64), torch.tensor([0, 0, 3, 7, 21, 39])
