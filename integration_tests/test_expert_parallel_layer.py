"""The MoE layer of the model under expert parallelism equals the replicated layer bit for bit."""

import pytest
import torch


def moe_layer(ep: int, dtype_name: str, device_type: str):
    """One MoE layer over this rank's tokens; returns output, input gradient and whole expert gradients."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    from ep_dispatch import shard_experts
    from moe_core import MoE, MoEConfig

    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(device_type, rank) if device_type != "cpu" else torch.device("cpu")
    dtype = getattr(torch, dtype_name)
    torch.manual_seed(7)
    layer = MoE(MoEConfig(dim=40, num_experts=6, top_k=3, hidden_dim=24, shared_hidden_dim=16), device="meta")
    layer = shard_experts(layer, init_device_mesh(device_type, (ep,), mesh_dim_names=("ep",))) if ep > 1 else layer
    layer.to_empty(device=device)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in layer.parameters():
            whole = torch.randn(parameter.shape, generator=generator) * 0.2
            if isinstance(parameter, DTensor):
                first = [6 * r // ep for r in range(ep)][rank]
                parameter.to_local().copy_(whole[first : first + 6 // ep])
            else:
                parameter.copy_(whole)
        for buffer in layer.buffers():
            buffer.zero_()
    layer.to(dtype)
    batches = [torch.randn(n, 40, generator=generator).to(dtype) for n in [5, 0]]
    mine = (batches[rank] if world > 1 else torch.cat(batches)).to(device).requires_grad_()
    weight = torch.randn(5, 40, generator=generator).to(dtype).to(device)
    output = layer(mine)
    (output * (weight if len(output) else weight[:0])).sum().backward()
    gradients = [parameter.grad for name, parameter in layer.named_parameters() if name.startswith("experts.")]
    whole_gradients = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return [part.detach().cpu() for part in (output, mine.grad, *whole_gradients)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_one_of_them_without_tokens_give_the_bits_of_one(dtype, on_ranks, device_type):
    (whole,) = on_ranks(moe_layer, 1, 1, dtype, device_type)
    first, second = on_ranks(moe_layer, 2, 2, dtype, device_type)
    assert torch.equal(torch.cat([first[0], second[0]]), whole[0])
    assert torch.equal(torch.cat([first[1], second[1]]), whole[1])
    for part in range(2, len(whole)):
        assert whole[part].abs().max() > 0
        assert torch.equal(first[part], whole[part])
        assert torch.equal(second[part], whole[part])
