"""Generation: equal to the uncached model, greedy, sampled, as a stream."""

import attrs
import pytest
import torch

from nemotron_nano import NemotronNano, presets
from nemotron_nano.generate import generate, generate_stream

CONFIG = attrs.evolve(
    presets["tiny"], pattern="MEM*E-*", hidden_size=48, vocab_size=61, num_experts=6, expert_hidden_size=24,
    shared_expert_hidden_size=32, mlp_hidden_size=40, chunk_size=8,
)  # fmt: skip


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = NemotronNano(CONFIG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.uniform_(-2, 0)
            elif name.endswith("A_log"):
                parameter.uniform_(-4, -1)
            elif parameter.dim() > 1 and "conv1d" not in name:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


@pytest.mark.parametrize("pieces", [[1] * 20, [13, 1, 1, 1, 1, 1, 1, 1], [2, 9, 1, 8], [20]])
def test_cached_logits_equal_the_uncached_ones(model, pieces):
    model.eval()
    tokens = torch.randint(61, (2, 20))
    cache = model.new_cache()
    with torch.no_grad():
        expected = model(tokens)
        got = torch.cat([model(piece, cache=cache) for piece in tokens.split(pieces, dim=1)], dim=1)
    assert (got - expected).abs().max() < 1e-5
    assert expected.std() > 0.3


def test_greedy_takes_the_likeliest_token(model):
    tokens = torch.randint(61, (2, 7))
    out = generate(model, tokens, 12)
    assert out.shape == (2, 19)
    assert torch.equal(out[:, :7], tokens)
    model.eval()
    for end in range(7, 19):
        with torch.no_grad():
            assert torch.equal(out[:, end], model(out[:, :end])[:, -1].argmax(-1))


def test_a_stream_gives_the_same_tokens(model):
    tokens = torch.randint(61, (2, 7))
    stream = generate_stream(model, tokens, 5)
    assert torch.equal(torch.stack(list(stream), dim=1), generate(model, tokens, 5)[:, 7:])


def test_prompts_of_unequal_length_are_continued_as_if_alone(model):
    prompts = [torch.randint(61, (length,)) for length in (7, 2, 1, 12)]
    alone = [generate(model, prompt.unsqueeze(0), 6)[0] for prompt in prompts]
    together = generate(model, prompts, 6)
    assert [len(row) for row in together] == [13, 8, 7, 18]
    assert all(torch.equal(ours, expected) for ours, expected in zip(together, alone, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(generate(model, prompts, 0), prompts, strict=True))
    assert generate(model, [], 3) == []


def test_unequal_prompts_that_cannot_be_continued_are_refused(model):
    with pytest.raises(ValueError, match=r"\(1, 0\)"):
        generate(model, [torch.zeros(2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)], 1)


def test_sampling_follows_the_generator_and_the_probabilities(model):
    tokens = torch.randint(61, (1, 7)).expand(2000, -1)
    out = generate(model, tokens, 1, temperature=0.7, generator=torch.Generator().manual_seed(1))[:, -1]
    again = generate(model, tokens, 1, temperature=0.7, generator=torch.Generator().manual_seed(1))[:, -1]
    assert torch.equal(out, again)
    with torch.no_grad():
        expected = (model.eval()(tokens[:1])[0, -1] / 0.7).softmax(-1)
    assert (out.bincount(minlength=61) / 2000 - expected).abs().max() < 0.04


def test_top_p_draws_among_the_likeliest_only(model):
    tokens = torch.randint(61, (1, 7)).expand(500, -1)
    with torch.no_grad():
        probabilities, order = model.eval()(tokens[:1])[0, -1].softmax(-1).sort(descending=True)
    kept = int((probabilities.cumsum(-1) < 0.5).sum()) + 1
    out = generate(model, tokens, 1, temperature=1.0, top_p=0.5)[:, -1]
    assert set(out.tolist()) == set(order[:kept].tolist())
    greedy = generate(model, tokens[:2], 3, temperature=1.0, top_p=1e-6)
    assert torch.equal(greedy, generate(model, tokens[:2], 3))


def test_generation_leaves_no_trace_in_the_model(model):
    model.train()
    generate(model, torch.randint(61, (1, 7)), 3)
    assert model.training
    assert not any(b.any() for name, b in model.named_buffers() if name.endswith("tokens_per_expert"))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("tokens", "settings", "word"),
    [
        ([torch.zeros(3), torch.zeros(2)], {}, "prompts of one length"),
        (torch.zeros(1, 0, dtype=torch.int64), {}, "at least 1"),
        (torch.zeros(1, 1, dtype=torch.int64), {"temperature": -1.0}, "temperature = -1.0"),
        (torch.zeros(1, 1, dtype=torch.int64), {"top_p": 0.0}, "top_p = 0.0"),
        (torch.zeros(1, 1, dtype=torch.int64), {"max_new_tokens": -1}, "max_new_tokens = -1"),
    ],
)
def test_what_cannot_be_generated_is_refused(model, tokens, settings, word):
    with pytest.raises(ValueError, match=word):
        generate_stream(model, tokens, **{"max_new_tokens": 1, **settings})
