"""The warning for training loops that never update the routers' bias, and the loops that must not see it."""

import copy
import gc
import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_core import MoE, TopKRouter, _balance, update_router_bias
from moe_core.testing import count_host_syncs, run_ranks

STEPS = 3 * _balance.STEPS


def make_routers(number=3, **options):
    return nn.ModuleList([TopKRouter(8, 4, 2, **options) for _ in range(number)])


def train(routers, steps, *, microbatches=1, optimizers=1, after=lambda: None, reentrant=None):
    parts = [list(routers.parameters())[i::optimizers] for i in range(optimizers)]
    steppers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    for _ in range(steps):
        for _ in range(microbatches):
            hidden = torch.randn(5, 8, requires_grad=True)
            for router in routers:
                if reentrant is None:
                    weights = router(hidden).expert_weights
                else:
                    weights = checkpoint(lambda x, r=router: r(x).expert_weights, hidden, use_reentrant=reentrant)
                weights.square().sum().backward()
        for optimizer in steppers:
            optimizer.step()
            optimizer.zero_grad()
        after()


def messages(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "moe_core._balance"]


@pytest.mark.parametrize(
    "options", [{}, {"microbatches": 3}, {"optimizers": 3}, {"reentrant": True}, {"reentrant": False}]
)
def test_a_forgotten_update_is_told_once(caplog, options):
    routers = make_routers()
    train(routers, _balance.STEPS, **options)
    assert messages(caplog) == [], "too early"
    train(routers, STEPS, **options)
    (message,) = messages(caplog)
    assert "3 router(s)" in message
    assert f"{_balance.STEPS} optimizer steps" in message
    assert "moe_core.update_router_bias(model, mesh)" in message
    assert caplog.records[0].levelno == logging.WARNING


def test_many_microbatches_are_one_step(caplog):
    train(make_routers(1), 2, microbatches=20 * _balance.STEPS)
    assert messages(caplog) == []


def test_the_third_of_three_layers_is_told_of_alone(caplog):
    """And a layer without a bias, or with a frozen router, is not."""
    routers = make_routers()
    routers.append(TopKRouter(8, 4, 2, selection_bias=False))
    routers.append(TopKRouter(8, 4, 2))
    routers[4].weight.requires_grad_(False)
    train(routers, STEPS, after=lambda: update_router_bias(routers[:2], None))
    (message,) = messages(caplog)
    assert "1 router(s)" in message


@pytest.mark.parametrize("rate", [1e-3, 0.0])
@pytest.mark.parametrize("every", [1, 4])
def test_a_loop_that_updates_is_left_alone(caplog, rate, every):
    routers, calls = make_routers(), []

    def after():
        calls.append(None)
        if len(calls) % every == 0:
            update_router_bias(routers, None, rate=rate)

    train(routers, STEPS, after=after)
    assert messages(caplog) == []


def test_a_bias_that_is_written_by_other_means_is_left_alone(caplog):
    routers = make_routers()
    train(routers, STEPS, after=lambda: [router.bias.add_(0.01) for router in routers])
    assert messages(caplog) == []


def test_evaluation_and_other_models_steps_are_left_alone(caplog):
    routers = make_routers().eval()
    train(routers, STEPS)
    routers.train()
    routers[0](torch.randn(5, 8))
    train(nn.ModuleList([TopKRouter(8, 4, 2, selection_bias=False)]), STEPS)
    assert messages(caplog) == []


def test_watching_reads_nothing_back_and_keeps_nothing_alive():
    routers = make_routers()
    with count_host_syncs() as syncs:
        train(routers, STEPS)
    assert syncs.total == 0
    before = len(_balance._watches)
    other = copy.deepcopy(routers)
    train(other, 1)
    assert len(_balance._watches) == before + 3
    del other
    gc.collect()
    assert len(_balance._watches) == before


def under_fsdp(updates):
    """FSDP swaps the parameters for each forward pass; bias and optimizer stay what they are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger = logging.getLogger("moe_core._balance")
    logger.addHandler(handler)
    layers = nn.Sequential(*[MoE(dim=8, num_experts=4, top_k=2, hidden_dim=8) for _ in range(2)])
    mesh = init_device_mesh("cpu", (2,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(20):
        layers(torch.randn(3, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if updates:
            update_router_bias(layers, mesh)
    logger.removeHandler(handler)
    return seen


@pytest.mark.parametrize("updates", [False, True])
def test_under_fsdp(updates):
    for seen in run_ranks(under_fsdp, 2, updates):
        assert len(seen) == (0 if updates else 1)
