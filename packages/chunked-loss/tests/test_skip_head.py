"""`skip_lm_head` on models that know nothing of this package, and the loss over them."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chunked_loss import ChunkedCLMCrossEntropyLoss, linear_cross_entropy, skip_lm_head
from moe_core.testing import run_ranks

B, S, V = 2, 10, 61


class Batch(NamedTuple):
    tokens: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor | None = None


def llama(softcap=None):
    """A model of transformers with D = 16; with a cap, the one that applies it to its logits itself."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "use_cache": False, "attn_implementation": "eager",
    }  # fmt: skip
    if softcap is None:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False))
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, final_logit_softcapping=softcap))


def tokens(sequences=B):
    g = torch.Generator().manual_seed(1)
    return torch.randint(0, V, (sequences, S), generator=g)


def gradients(model):
    got = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return got


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sequences", [3, 1])
def test_the_loss_of_a_transformers_model_without_its_logits(softcap, sequences):
    model, batch = llama(softcap).double(), Batch(tokens(sequences), tokens(sequences))
    logits = model(batch.tokens).logits[:, :-1].flatten(0, 1)
    want = F.cross_entropy(logits, batch.tokens[:, 1:].flatten(), reduction="sum")
    want.backward()
    want_gradients = gradients(model)
    loss = ChunkedCLMCrossEntropyLoss(shift=True, skip_head=True, num_chunks=4, softcap=softcap)
    out = loss(model, batch)
    out.sum.backward()
    torch.testing.assert_close(out.sum, want)
    torch.testing.assert_close(gradients(model), want_gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_changes_its_logits_is_refused(dtype):
    import transformers

    loss = ChunkedCLMCrossEntropyLoss(shift=True, skip_head=True)
    sizes = {
        "vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "tie_word_embeddings": False, "pad_token_id": 0,
    }  # fmt: skip
    granite = transformers.GraniteForCausalLM(transformers.GraniteConfig(**sizes, logits_scaling=8.0)).to(dtype)
    batch = Batch(tokens(), tokens())
    for model, node in ((granite, "DivBackward0"), (llama(softcap=1.5).to(dtype), "MulBackward0")):
        with pytest.raises(ValueError, match=rf"changes its logits after the head \({node}\).*give softcap"):
            loss(model, batch)
    loss(llama().to(dtype), batch)

    class Cast(nn.Module):
        """A cast, a slice and a view change nothing."""

        def __init__(self):
            super().__init__()
            self.inner, self.lm_head = nn.Embedding(V, 16), nn.Linear(16, V)

        def forward(self, numbers):
            return self.lm_head(self.inner(numbers)).float()[:, :].view(*numbers.shape, -1)

    loss(Cast().to(dtype), batch)


def test_the_hidden_states_are_what_the_head_would_get_and_the_head_comes_back():
    model = llama()
    head, names = model.lm_head, list(model.state_dict())
    with skip_lm_head(model) as skipped:
        with pytest.raises(RuntimeError, match="has not called its head"):
            _ = skipped.hidden
        out = model(tokens())
    assert skipped.hidden.shape == (B, S, 16)
    torch.testing.assert_close(out.logits, skipped.hidden)
    assert model.lm_head is head
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(tokens()).logits, head(skipped.hidden))
    loss = linear_cross_entropy(skipped.hidden, model.lm_head.weight, tokens())
    torch.testing.assert_close(loss, F.cross_entropy(model(tokens()).logits.flatten(0, 1), tokens().flatten()))


def test_the_head_comes_back_after_an_exception():
    model = llama()
    head, found = model.lm_head, []

    def fail():
        with skip_lm_head(model):
            found.append(model.lm_head)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert found[0] is not head
    assert model.lm_head is head
    with pytest.raises(ValueError, match="head = 'output': the model has no such submodule"):
        skip_lm_head(model, "output").__enter__()


def test_packed_documents_are_refused_where_the_model_would_mix_them():
    batch = Batch(tokens(), tokens(), torch.zeros(B, S, dtype=torch.int64))
    with pytest.raises(ValueError, match="skip_head = True: the model is called as model"):
        ChunkedCLMCrossEntropyLoss(skip_head=True)(llama(), batch)


class ThirdParty(nn.Module):
    """GPT-style: tokens in, logits out."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(V, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.lm_head = nn.Linear(16, V, bias=False)

    def forward(self, tokens):
        hidden = self.embeddings(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.lm_head(hidden)


def test_a_sharded_model_trains_so_on_several_ranks():
    def steps():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from moe_core.testing import count_collectives

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(0)
        model = ThirdParty()
        for part in (*model.layers, model.lm_head, model):
            fully_shard(part, mesh=mesh)
        mine = tokens(dist.get_world_size())[dist.get_rank() :][:1]
        results = []
        for chunked in (True, False):  # the chunked loss is the one that meets the model before FSDP set it up
            with count_collectives() as collectives:
                if chunked:
                    loss = ChunkedCLMCrossEntropyLoss(shift=True, skip_head=True, chunk_tokens=3)
                    total = loss(model, Batch(mine, mine)).sum
                else:
                    logits = model(mine)[:, :-1].flatten(0, 1)
                    total = F.cross_entropy(logits, mine[:, 1:].flatten(), reduction="sum")
                total.backward()
            gathers = sum(count for kind, count in collectives.calls.items() if "gather" in kind)
            results.append((gathers, {name: p.grad.full_tensor() for name, p in model.named_parameters()}))
            model.zero_grad()
        return results

    for (ours, chunked), (plain, want) in run_ranks(steps, 2):
        torch.testing.assert_close(chunked, want, rtol=1e-5, atol=1e-6)
        assert ours == plain - 1  # the plain loss gathers the head again in backward
