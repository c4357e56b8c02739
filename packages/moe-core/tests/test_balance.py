"""The bias moves by the loads of all ranks, once; the auxiliary losses have the right values and gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moe_core import MoE, TopKRouter, router_z_loss, sequence_balance_loss, update_router_bias
from moe_core.testing import count_collectives, run_ranks


def test_one_imbalanced_step_moves_the_right_entries():
    router = TopKRouter(8, 4, 1, normalize=False)
    router.tokens_per_expert.copy_(torch.tensor([9, 0, 3, 0]))  # mean 3
    loads = update_router_bias(nn.Sequential(router), None, rate=1e-3)
    torch.testing.assert_close(router.bias, torch.tensor([-1e-3, 1e-3, 0.0, 1e-3]))
    assert not router.tokens_per_expert.any()
    assert loads["0"].tolist() == [9, 0, 3, 0]


def test_a_rule_in_proportion_to_what_is_missing():
    router = TopKRouter(8, 4, 1, normalize=False)
    router.tokens_per_expert.copy_(torch.tensor([9, 0, 3, 0]))  # mean 3
    update_router_bias(router, None, rate=1e-3, rule="proportional")
    torch.testing.assert_close(router.bias, torch.tensor([-2e-3, 1e-3, 0.0, 1e-3]))
    before = router.bias.clone()
    update_router_bias(router, None, rule="proportional")
    assert torch.equal(router.bias, before), "no tokens, no update"
    router.tokens_per_expert.fill_(2**40)
    router.tokens_per_expert[3] += 4
    update_router_bias(router, None, rate=1.0, rule="proportional")
    assert 0 < (router.bias - before).abs().max() < 1e-6, "nearly even: as good as no update"


def test_an_unknown_rule_is_refused_before_anything_moves():
    router = TopKRouter(8, 4, 1, normalize=False)
    router.tokens_per_expert.fill_(1)
    with pytest.raises(ValueError, match="rule = 'cosine': must be one of sign, proportional"):
        update_router_bias(router, None, rule="cosine")
    assert router.tokens_per_expert.sum() == 4


def test_four_microbatches_are_one_update():
    layer = MoE(dim=8, num_experts=4, top_k=2, hidden_dim=8).train()
    for _ in range(4):
        layer(torch.randn(5, 8))
    assert layer.router.tokens_per_expert.sum() == 4 * 5 * 2
    update_router_bias(layer, None, rate=1e-3)
    assert layer.router.bias.abs().max() <= 1e-3 + 1e-9
    update_router_bias(layer, None, rate=1e-3)
    assert layer.router.bias.abs().max() <= 1e-3 + 1e-9, "no tokens, no update"


def test_a_layer_without_bias_stops_no_other():
    layers = nn.ModuleList([TopKRouter(8, n, 1, normalize=False, selection_bias=n != 5) for n in (4, 5, 6)])
    for router in layers:
        router.tokens_per_expert[0] = 12
    update_router_bias(layers, None, rate=0.5)
    assert layers[0].bias.tolist() == [-0.5] + [0.5] * 3
    assert layers[2].bias.tolist() == [-0.5] + [0.5] * 5
    assert not any(router.tokens_per_expert.any() for router in layers)


def test_a_mean_that_is_no_integer_is_compared_exactly():
    router = TopKRouter(8, 3, 1, normalize=False)
    big = 2**40
    router.tokens_per_expert.copy_(torch.tensor([big, big, big + 1]))  # fp32 would see three equal loads
    update_router_bias(router, None, rate=1.0)
    assert router.bias.tolist() == [1.0, 1.0, -1.0]


def train_on_other_data(shape, flattened, along):
    """Ten steps on data that differ by rank; `along` the axis to sum over, None for all, which is right."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "ep"))
    if flattened:
        mesh._flatten("dp")
    torch.manual_seed(0)
    layers = nn.ModuleList([MoE(dim=8, num_experts=6, top_k=2, hidden_dim=8) for _ in range(3)]).train()
    torch.manual_seed(100 + dist.get_rank())
    group = mesh if along is None else mesh[along]
    groups_before = dist.distributed_c10d._world.group_count
    for _ in range(10):
        for layer in layers:
            layer(torch.randn(7, 8))
        with count_collectives() as collectives:
            update_router_bias(layers, group, rate=1e-2)
    assert dist.distributed_c10d._world.group_count == groups_before, "a step created a process group"
    return torch.stack([layer.router.bias for layer in layers]), collectives.total


@pytest.mark.parametrize("shape", [(1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2)])
def test_bias_is_bit_equal_on_all_ranks(shape):
    """Experts' peers and replicas included: no rank's tokens are left out of any rank's bias."""
    biases, collectives = zip(*run_ranks(train_on_other_data, 4, shape, False, None), strict=True)
    assert all(torch.equal(bias, biases[0]) for bias in biases)
    assert biases[0].abs().max() > 1e-3
    assert collectives == (sum(size > 1 for size in shape),) * 4
    flat, one = zip(*run_ranks(train_on_other_data, 4, shape, True, None), strict=True)
    assert all(torch.equal(bias, biases[0]) for bias in flat)
    assert one == (1,) * 4


@pytest.mark.parametrize(
    ("shape", "along", "equal"), [((2, 1, 2), "ep", [0, 0, 1, 1]), ((2, 2, 1), "replicate", [0, 1, 0, 1])]
)
def test_negative_control_the_wrong_group_lets_the_bias_drift_apart(shape, along, equal):
    biases = [bias for bias, _ in run_ranks(train_on_other_data, 4, shape, False, along)]
    for one in range(4):
        for other in range(4):
            assert torch.equal(biases[one], biases[other]) == (equal[one] == equal[other])


def test_loads_are_summed_over_a_group():
    def update():
        router = TopKRouter(8, 3, 1, normalize=False)
        router.tokens_per_expert[dist.get_rank()] = 4  # each rank alone would push another expert down
        router.tokens_per_expert[2] += 1
        update_router_bias(router, dist.group.WORLD, rate=1.0)
        return router.bias.tolist()

    assert run_ranks(update, 2) == [[-1.0, -1.0, 1.0]] * 2


def aux_reference(logits, ids, probability):
    """E / (K S^2) sum_e count_e sum_s p_se of one sequence, by loops in float64."""
    length, num_experts = logits.shape
    top_k = ids.shape[1]
    total = 0.0
    for expert in range(num_experts):
        count = sum(int(i == expert) for row in ids.tolist() for i in row)
        total += count * sum(float(p[expert]) for p in probability)
    return num_experts / (top_k * length**2) * total


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_sequence_balance_loss_equals_the_formula(score):
    torch.manual_seed(0)
    logits = torch.randn(3, 7, 5)
    ids = torch.rand(3, 7, 5).topk(2).indices
    values = []
    for sequence, chosen in zip(logits.double(), ids, strict=True):
        scores = sequence.sigmoid() if score == "sigmoid" else sequence.exp()
        values.append(aux_reference(sequence, chosen, scores / scores.sum(-1, keepdim=True)))
    ours = [sequence_balance_loss(a, b, score=score) for a, b in zip(logits, ids, strict=True)]
    torch.testing.assert_close(torch.stack(ours).double(), torch.tensor(values).double())
    mean = sequence_balance_loss(logits, ids, score=score)
    torch.testing.assert_close(mean.double(), torch.tensor(sum(values) / 3).double(), rtol=1e-5, atol=1e-6)
    total = sequence_balance_loss(logits, ids, score=score, reduction="sum")
    torch.testing.assert_close(total, mean * 21)


def test_balanced_is_one_and_skewed_is_clearly_bigger():
    even_ids = (torch.arange(24) % 6).view(12, 2)
    assert sequence_balance_loss(torch.zeros(12, 6), even_ids).item() == pytest.approx(1.0)
    skewed = torch.tensor([6.0, 5.0, -4, -4, -4, -4]).expand(12, 6)
    assert sequence_balance_loss(skewed, torch.tensor([[0, 1]]).expand(12, 2)).item() > 2.5
    assert sequence_balance_loss(skewed, torch.tensor([[0, 1]]).expand(12, 2), score="softmax").item() > 2.5


def test_padding_counts_nowhere():
    torch.manual_seed(0)
    logits, ids = torch.randn(2, 5, 6), torch.rand(2, 5, 6).topk(2).indices
    padded = torch.cat([logits, torch.full((2, 3, 6), 50.0)], 1)
    padded_ids = torch.cat([ids, torch.full((2, 3, 2), 6)], 1)
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[:, 5:] = True
    for reduction in ("mean", "sum"):
        torch.testing.assert_close(
            sequence_balance_loss(padded, padded_ids, padding_mask=mask, reduction=reduction),
            sequence_balance_loss(logits, ids, reduction=reduction),
        )
        torch.testing.assert_close(
            router_z_loss(padded, padding_mask=mask, reduction=reduction), router_z_loss(logits, reduction=reduction)
        )


def test_only_padding_gives_zero_and_no_nan():
    logits = torch.randn(2, 3, 4, requires_grad=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    ids = torch.full((2, 3, 2), 4)
    loss = sequence_balance_loss(logits, ids, padding_mask=mask) + router_z_loss(logits, padding_mask=mask)
    loss.backward()
    assert loss.item() == 0.0
    assert (logits.grad == 0).all()


def test_gradients_pass_gradcheck():
    logits = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.rand(2, 4, 5).topk(3).indices
    for score in ("sigmoid", "softmax"):
        assert torch.autograd.gradcheck(lambda x, s=score: sequence_balance_loss(x, ids, score=s), logits)
    assert torch.autograd.gradcheck(router_z_loss, logits)
    mask = torch.tensor([[False, True, False, False], [True, True, True, False]])
    masked = torch.where(mask.unsqueeze(-1), 5, ids)
    for reduction in ("mean", "sum"):
        options = {"padding_mask": mask, "reduction": reduction}
        assert torch.autograd.gradcheck(lambda x, o=options: sequence_balance_loss(x, masked, **o), logits)
        assert torch.autograd.gradcheck(lambda x, o=options: router_z_loss(x, **o), logits)
        (gradient,) = torch.autograd.grad(
            sequence_balance_loss(logits, masked, **options) + router_z_loss(logits, **options), logits
        )
        assert (gradient[mask] == 0).all()
        assert (gradient[~mask] != 0).any(-1).all()


def test_the_gradient_of_a_layer_with_auxiliary_loss_is_the_sum_of_both():
    torch.manual_seed(0)
    layer = MoE(dim=8, num_experts=6, top_k=2, hidden_dim=8)
    hidden = torch.randn(9, 8)

    def router_gradient(main, auxiliary):
        layer.zero_grad()
        out, routing = layer.forward_with_routing(hidden)
        loss = main * out.square().sum() + auxiliary * sequence_balance_loss(routing.logits, routing.expert_ids)
        loss.backward()
        return layer.router.weight.grad.clone()

    both, only_main, only_auxiliary = router_gradient(1, 0.5), router_gradient(1, 0), router_gradient(0, 1)
    assert only_auxiliary.abs().max() > 0
    torch.testing.assert_close(both - only_main, 0.5 * only_auxiliary, rtol=1e-3, atol=1e-6)


def test_z_loss_value():
    logits = torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    expected = (torch.tensor(2.0).log() ** 2 + (torch.tensor(1.0).exp() + torch.tensor(3.0).exp()).log() ** 2) / 2
    torch.testing.assert_close(router_z_loss(logits), expected)
    assert router_z_loss(torch.empty(0, 4)).item() == 0.0
