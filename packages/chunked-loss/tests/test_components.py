"""The components as the plugin host finds them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from moe_core.plugins import Batch, LossOutput, Selected, load_registry


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(17, 6)
        self.lm_head = nn.Linear(6, 17, bias=False)

    def forward(self, tokens, *, document_ids=None, return_hidden=False):
        hidden = self.embeddings(tokens)
        return hidden if return_hidden else self.lm_head(hidden).float()


def selected(name, **fields):
    component = load_registry().find("loss", name).component
    return Selected(component, component.load_config_class()(**fields))


# dynamo hides this warning of its own look at a tensor, which cannot work where warnings are errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["clm_cross_entropy", "chunked_clm_cross_entropy"])
def test_losses_give_the_hosts_output(name):
    torch.manual_seed(0)
    model, tokens = Model(), torch.randint(0, 17, (2, 5))
    batch = Batch(tokens, tokens.roll(-1, 1))
    run = SimpleNamespace(model=model)
    plain = selected("clm_cross_entropy").build(run)(model, batch)
    for loss in (selected(name), selected("compiled", inner=selected(name), backend="eager")):
        out = loss.build(run)(model, batch)
        assert isinstance(out, LossOutput)
        assert out.tokens == 10
        torch.testing.assert_close(out.sum, plain.sum)
        out.sum.backward()


def test_a_compiled_loss_names_what_it_lacks():
    with pytest.raises(ValueError, match=r"loss.inner: must name the loss to compile"):
        selected("compiled").build(SimpleNamespace())


@pytest.mark.parametrize(
    "fields",
    [
        {"chunk_tokens": 0},
        {"num_chunks": 0},
        {"vocab_size": 0},
        {"z_loss": -1.0},
        {"label_smoothing": 2.0},
        {"softcap": 0.0},
    ],
)
def test_settings_out_of_range_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        selected("chunked_clm_cross_entropy", **fields)
