"""The stacked experts of transformers 5, which know nothing of expert parallelism, in our wrapper."""

import pytest


def foreign_experts(family, implementation, num_experts, tokens, device_type):
    """Forward and backward of transformers' own module on all tokens, and of the wrapped one on this rank's."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts
    from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    from ep_dispatch import ExpertParallelGroupedExperts

    def make():
        if family == "mixtral":
            config = MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=num_experts)
            kind = MixtralExperts
        else:
            config = NemotronHConfig(hidden_size=16, moe_intermediate_size=24, n_routed_experts=num_experts)
            kind = NemotronHExperts
        config._experts_implementation = implementation
        module = kind(config)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.3)
        return module.to(device_type)

    rank, degree = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    alone, foreign = make(), make()
    foreign.load_state_dict(alone.state_dict())
    names = list(foreign.state_dict())
    wrapped = ExpertParallelGroupedExperts(
        foreign, init_device_mesh(device_type, (degree,), mesh_dim_names=("ep",)), num_experts=num_experts
    )
    total, mine = sum(tokens), slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    hidden, weights, grad = (torch.randn(total, n).to(device_type) for n in (16, 3, 16))
    results = []
    # all experts; then only those of the first rank, so that the others receive nothing
    for choices in (num_experts, -(-num_experts // degree)):
        ids = torch.rand(total, choices).argsort(1)[:, :3].to(device_type)
        if ids.shape[1] < 3:
            ids = ids[:, [0, 1, 0]]
        pairs = []
        for module, part in ((alone, slice(None)), (wrapped, mine)):
            x, w = hidden[part].clone().requires_grad_(), weights[part].clone().requires_grad_()
            module.zero_grad()
            out = module(x, ids[part], w)
            out.backward(grad[part])
            pairs.append((out, x.grad, w.grad))
        checks = [torch.allclose(a[mine], b, rtol=1e-4, atol=1e-5) for a, b in zip(*pairs, strict=True)]
        for full, sharded in zip(alone.parameters(), wrapped.parameters(), strict=True):
            local = sharded.grad.to_local()
            checks.append(torch.allclose(full.grad.chunk(degree)[rank], local, rtol=1e-4, atol=1e-5))
        results.append(checks)
    return results, list(wrapped.state_dict()) == names


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", ["mixtral", "nemotron_h"])
@pytest.mark.parametrize(("num_experts", "tokens"), [(5, (7, 4)), (10, (5, 0, 1, 8))])
def test_experts_of_transformers_equal_themselves(family, implementation, num_experts, tokens, on_ranks, device_type):
    """5 experts on 2 ranks are 3 + 2, 10 on 4 are 3 + 3 + 3 + 1; one rank has no tokens, and some receive none."""
    results = on_ranks(foreign_experts, len(tokens), family, implementation, num_experts, tokens, device_type)
    for checks, same_names in results:
        assert checks == [[True] * 5] * 2
        assert same_names
