"""The clipper as a trainer gets it."""

import pytest
import torch
from torch import nn

from grad_clip_multimesh._plugin import ClipperConfig, moe_components


def _clip(**fields):
    (component,) = moe_components()
    assert (component.kind, component.name) == ("clipper", "multi_mesh")
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 2.0)
    clip = component.load_factory()(component.load_config_class()(**fields), None)
    return clip([parameter]), parameter.grad


def test_the_default_clips_to_one():
    norm, gradient = _clip()
    assert norm.item() == 4.0
    assert torch.allclose(gradient, torch.full((4,), 0.5), rtol=1e-5)


def test_without_a_limit_the_norm_is_only_reported():
    norm, gradient = _clip(max_norm=None, norm_type=1.0)
    assert norm.item() == 8.0
    assert torch.equal(gradient, torch.full((4,), 2.0))


@pytest.mark.parametrize("fields", [{"max_norm": 0.0}, {"max_norm": -1.0}, {"norm_type": 0.0}])
def test_limits_are_above_zero(fields):
    with pytest.raises(ValueError, match="above 0"):
        ClipperConfig(**fields)
