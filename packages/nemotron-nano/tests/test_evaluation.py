"""Evaluation needs as many batches on every rank; where they differ all ranks say so before the first forward pass."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ep_dispatch import shard_experts
from moe_core import MoE
from moe_core.plugins import Batch, LossOutput
from moe_core.testing import run_ranks
from nemotron_nano.train.pretrain import TrainingError, evaluate


def evaluate_with(batches_by_rank):
    """What each rank says of an evaluation of an expert-parallel layer, and how often it went forward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Embedding(9, 8), shard_experts(MoE(dim=8, num_experts=4, top_k=2, hidden_dim=8), mesh))
    forwards = []

    def loss(model, batch):
        forwards.append(None)
        total = model(batch.tokens).sum()
        return LossOutput(total, torch.tensor(batch.tokens.numel()), {"cross_entropy": total})

    tokens = torch.arange(6).view(2, 3)
    batches = [Batch(tokens, tokens, None)] * batches_by_rank[dist.get_rank()]
    data = SimpleNamespace(validation_batches=lambda: batches, describe=dict)
    run = SimpleNamespace(model=model, loss=loss, data=data, sub_mesh=lambda name: mesh)
    try:
        return list(evaluate(run)), len(forwards)
    except TrainingError as error:
        return str(error), len(forwards)


@pytest.mark.parametrize(("batches", "told"), [((3, 2), "[3, 2]"), ((0, 2), "[0, 2]"), ((0, 0), "[0, 0]")])
def test_other_numbers_of_batches_are_an_error_on_all_ranks_before_the_first_forward(batches, told):
    message = (
        f"data.validation_batches() gave ranks {told} batches: must be as many on every rank, and at least one; pad "
        "the short ranks with batches whose labels are all ignored"
    )
    assert run_ranks(evaluate_with, 2, batches, timeout=30) == [(message, 0)] * 2


def test_as_many_batches_on_every_rank_are_evaluated():
    assert run_ranks(evaluate_with, 2, (2, 2)) == [(["loss", "bits_per_token"], 2)] * 2
