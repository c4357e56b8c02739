"""Which experts each rank of the expert-parallel axis holds: the split of `torch.chunk`."""


class ExpertShardingError(ValueError):
    """A model's experts cannot be split over this mesh."""


def chunk_size(num_experts: int, degree: int) -> int:
    """Experts on every rank but the last ones, which may hold fewer.

    Raises:
        ExpertShardingError: a rank would hold none.
    """
    size = -(-num_experts // degree)
    if (degree - 1) * size >= num_experts:
        work = ", ".join(str(d) for d in range(1, num_experts + 1) if (d - 1) * -(-num_experts // d) < num_experts)
        counts = ", ".join(str(len(owned_experts(num_experts, size, rank))) for rank in range(degree))
        raise ExpertShardingError(
            f"num_experts = {num_experts} on ep = {degree} ranks leaves a rank without an expert ({counts}): every "
            f"rank must hold at least one; degrees that work: {work}"
        )
    return size


def owned_experts(num_experts: int, size: int, rank: int) -> range:
    """The experts of `rank`, where `size` is `chunk_size`."""
    return range(min(rank * size, num_experts), min((rank + 1) * size, num_experts))
