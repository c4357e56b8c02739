"""Several clipped optimizer steps under every layout of four ranks, against one process in float64.

The reference is the model alone in one process, with torch's own cross entropy, clipping and optimizers. The ranks
differ in all they can: in rows, in valid labels; one has no label at all, and one no token.
"""

from typing import Any

import attrs
import pytest
import torch

STEPS = ("SGD", "SGD", "SGD", "AdamW", "AdamW", "AdamW")
MAX_NORM, RATE, SEQUENCE, VOCABULARY = 0.3, 1e-3, 7, 31

ROWS = ((2, 1, 1), (1, 3, 1), (1, 1, 1), (0, 0, 0))
"""[rank][microbatch]; the labels of rank 2 are all ignored."""


@attrs.frozen
class Case:
    """A layout with a number of experts, and how the step is taken."""

    degrees: dict[str, int]
    num_experts: int = 8
    microbatches: int = 1
    checkpoint: str = "none"
    crowded: bool = False
    """All tokens go to the first expert alone, so that other ep ranks get none."""


CASES = [
    Case({}, microbatches=3, checkpoint="full"),
    Case({}, num_experts=5),  # 2, 2, 1, 0
    Case({}, num_experts=6, checkpoint="selective"),  # 2, 2, 2, 0
    Case({}, num_experts=7, microbatches=3),
    Case({}, num_experts=10, crowded=True),
    Case({"ep": 2}),
    Case({"ep": 2}, microbatches=3, checkpoint="full", crowded=True),
    Case({"ep": 2}, num_experts=5, checkpoint="selective"),
    Case({"ep": 2}, num_experts=6, microbatches=3),
    Case({"ep": 2}, num_experts=7),
    Case({"ep": 2}, num_experts=10, microbatches=3, checkpoint="full"),
    Case({"ep": 4}, checkpoint="full"),
    Case({"ep": 4}, microbatches=3, crowded=True),
    Case({"ep": 4}, num_experts=7, checkpoint="full"),  # 2, 2, 2, 1
    Case({"ep": 4}, num_experts=10, microbatches=3),  # 3, 3, 3, 1
    Case({"dp_replicate": 2}, microbatches=3),
    Case({"dp_replicate": 2, "ep": 2}, microbatches=3, checkpoint="full"),
    Case({"dp_replicate": 2, "ep": 2}, num_experts=5, crowded=True),
]
LAYOUTS = [dict(degrees) for degrees in sorted({tuple(sorted(case.degrees.items())) for case in CASES})]


def small_model(case: Case) -> Any:
    import torch

    from nemotron_nano import NemotronNano, presets

    config = attrs.evolve(
        presets["tiny"],
        pattern="E*E",
        vocab_size=VOCABULARY,
        hidden_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        mamba_num_heads=4,
        mamba_head_dim=8,
        mamba_num_groups=2,
        ssm_state_size=4,
        chunk_size=4,
        num_experts=case.num_experts,
        top_k=1 if case.crowded else 2,
        # one expert's normalised weight is 1 whatever the router says, and its gradient rounding alone
        normalize_top_k=not case.crowded,
        expert_hidden_size=20,
        shared_expert_hidden_size=16,
    )
    torch.manual_seed(3)
    model = NemotronNano(config, grouped_gemm="loop")
    for router in routers(model):
        router.bias.copy_(torch.linspace(-0.1, 0.1, case.num_experts))
        if case.crowded:
            router.bias[0] += 10
    return model


def routers(model: Any) -> list[Any]:
    return [layer.mixer.router for layer in model.backbone.layers if hasattr(layer.mixer, "router")]


def microbatches_of(step: int, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels [rows, SEQUENCE] of each of three microbatches."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    made = []
    for rows in ROWS[rank]:
        tokens, labels = torch.randint(0, VOCABULARY, (2, rows, SEQUENCE), generator=generator)
        ignored = torch.rand(rows, SEQUENCE, generator=generator) < 0.25 * rank
        made.append((tokens, torch.where(ignored | torch.tensor(rank == 2), -100, labels)))
    return made


def optimizer_of(kind: str, model: Any) -> torch.optim.Optimizer:
    if kind == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)


def one_process(case: Case) -> list[dict[str, Any]]:
    """After each step the loss, the norm, the clipped gradients and the weights, in float64."""
    model = small_model(case).double()
    optimizers = {kind: optimizer_of(kind, model) for kind in set(STEPS)}
    results = []
    for step, kind in enumerate(STEPS):
        pieces = [piece for rank in range(4) for piece in microbatches_of(step, rank)]
        tokens, labels = (torch.cat(column) for column in zip(*pieces, strict=True))
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        optimizers[kind].step()
        optimizers[kind].zero_grad()
        for router in routers(model):
            counts = router.tokens_per_expert.double()
            router.bias += RATE * (counts.mean() - counts).sign()
            router.tokens_per_expert.zero_()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        results.append({"loss": loss.item(), "norm": norm.item(), "gradients": gradients, "weights": weights})
    return results


def worst_errors(case: Case, expected: list[dict[str, Any]], mesh: Any, device_type: str) -> list[dict[str, float]]:
    """The largest relative errors of each step of the ranks at hand."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from chunked_loss import ChunkedCLMCrossEntropyLoss, global_denominator
    from ep_dispatch import shard_experts
    from ep_mesh import resolve_sub_mesh
    from fsdp_ep import apply_activation_checkpointing, fully_shard_moe, set_requires_gradient_sync
    from grad_clip_multimesh import clip_grad_norm_
    from moe_core import update_router_bias
    from moe_core.plugins import Batch

    def distance(actual: torch.Tensor, right: torch.Tensor) -> float:
        whole = (actual.full_tensor() if isinstance(actual, DTensor) else actual).detach().cpu()
        return ((whole.double() - right).norm() / right.norm().clamp_min(1e-12)).item()

    outer = ("dp_replicate",) if "dp_replicate" in case.degrees else ()

    def sub_mesh(inner: str) -> Any:
        return resolve_sub_mesh(mesh, (*outer, inner) if outer else inner)

    model = small_model(case).to(device_type)
    shard_experts(model, resolve_sub_mesh(mesh, "ep"))
    apply_activation_checkpointing(model, case.checkpoint)
    fully_shard_moe(
        model,
        dp_mesh=sub_mesh("dp_shard"),
        ep_mesh=resolve_sub_mesh(mesh, "ep"),
        expert_dp_mesh=sub_mesh("dp_shard_mod_ep"),
        embedding=model.backbone.embeddings,
        separate_lm_head=True,
    )
    dp = resolve_sub_mesh(mesh, "dp")
    loss_function = ChunkedCLMCrossEntropyLoss(chunk_tokens=5)
    optimizers = {kind: optimizer_of(kind, model) for kind in set(STEPS)}
    errors = []
    for step, (kind, right) in enumerate(zip(STEPS, expected, strict=True)):
        pieces = microbatches_of(step, dist.get_rank())
        if case.microbatches == 1:
            pieces = [tuple(torch.cat(column) for column in zip(*pieces, strict=True))]
        pieces = [(tokens.to(device_type), labels.to(device_type)) for tokens, labels in pieces]
        denominator = global_denominator([labels for _, labels in pieces], dp)
        total = torch.zeros((), device=device_type)
        for index, (tokens, labels) in enumerate(pieces, start=1):
            set_requires_gradient_sync(model, index == len(pieces))
            loss = loss_function(model, Batch(tokens, labels, None)).sum / denominator
            loss.backward()
            total += loss.detach() / dp.size()
        dist.all_reduce(total)
        norm = clip_grad_norm_(model.parameters(), MAX_NORM)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert gradients.keys() == right["gradients"].keys()
        of_step = {
            "loss": abs(total.item() / right["loss"] - 1),
            "norm": abs(norm.item() / right["norm"] - 1),
            "gradient": max(distance(gradients[name], gradient) for name, gradient in right["gradients"].items()),
        }
        optimizers[kind].step()
        optimizers[kind].zero_grad()
        update_router_bias(model, dp, rate=RATE)
        if STEPS[step + 1 : step + 2] != (kind,):  # the last step with this optimizer
            weights = model.state_dict()
            of_step["weight"] = max(distance(weights[name], weight) for name, weight in right["weights"].items())
        errors.append(of_step)
    return errors


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, bool], list[dict[str, Any]]]:
    """By the number of experts and whether they are crowded: nothing else changes what is right."""
    found: dict[tuple[int, bool], list[dict[str, Any]]] = {}
    for case in CASES:
        key = (case.num_experts, case.crowded)
        if key not in found:
            found[key] = one_process(case)
    return found


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_steps_are_those_of_one_process(expected, on_ranks, device_type, degrees):
    cases = [case for case in CASES if case.degrees == degrees]
    right = [expected[case.num_experts, case.crowded] for case in cases]
    for steps in right:
        assert all(step["norm"] > MAX_NORM for step in steps), "clipping is not active"

    def all_cases() -> list[list[dict[str, float]]]:
        from ep_mesh import MeshConfig, build_mesh

        mesh = build_mesh(MeshConfig(**degrees).resolve(4), device_type)  # a group has threads that never sleep long
        return [worst_errors(case, steps, mesh, device_type) for case, steps in zip(cases, right, strict=True)]

    for of_rank in on_ranks(all_cases, 4):
        for case, steps in zip(cases, of_rank, strict=True):
            for step, errors in enumerate(steps):
                assert errors["loss"] < 1e-6, (case, step, errors)
                assert max(errors.values()) < 1e-5, (case, step, errors)
