"""Random meshes, placements and gradients; the reference gathers everything and takes one float64 norm."""

import math

import attrs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moe_core.testing import run_ranks

WORLD = 4

MESHES = {
    "flat": (4,),
    "renamed": (4,),
    "grid": (2, 2),
    "replicated": (2, 2),
    "cube": (2, 1, 2),
    "backwards": (2, 2),
}
"""Shapes by name. The first two have equal ranks under other axis names; the ranks of "backwards" are transposed."""


@attrs.frozen
class Drawn:
    """One parameter, and what each rank has of its gradient."""

    mesh: str | None
    """None: a plain tensor."""
    placements: tuple[str, ...]
    """By axis of the mesh: "R", "S0", "S1", "P" (the gradient alone; the parameter is replicated)."""
    shape: tuple[int, int]
    dtype: str
    local: bool
    """A plain tensor that differs from rank to rank of the mesh "flat"."""
    missing: tuple[int, ...]
    """Ranks whose gradient is None."""
    seed: int


@attrs.frozen
class Case:
    parameters: tuple[Drawn, ...]
    norm_type: float
    foreach: bool | None
    max_norm: float | None


def errors(cases):
    """What differs from the reference, on this rank: [(case, what)]."""
    meshes = _meshes()
    return [(case, wrong) for case in cases if (wrong := _compare(case, meshes))]


def _meshes():
    import torch
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    made = {
        name: init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"{name}_{axis}" for axis in range(len(shape))))
        for name, shape in MESHES.items()
        if name != "backwards"
    }
    made["backwards"] = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("x", "y"))
    made["grid"]["grid_0", "grid_1"]._flatten("grid_flat")
    return made


def _compare(case, meshes):
    import torch

    from grad_clip_multimesh import clip_grad_norm_

    parameters, wholes, local_to = [], [], {}
    for drawn in case.parameters:
        parameter, whole = _make(drawn, meshes)
        parameters.append(parameter)
        wholes.append(whole)
        if drawn.local:
            local_to[parameter] = meshes["flat"]
    everything = [part.flatten().double() for parts in wholes for part in parts]
    expected = torch.linalg.vector_norm(torch.cat([*everything, torch.zeros(1).double()]), case.norm_type)
    norm = clip_grad_norm_(
        (p for p in parameters), case.max_norm, case.norm_type, foreach=case.foreach, local_to=local_to
    )
    wrong = []
    if (type(norm), norm.shape, norm.dtype) != (torch.Tensor, (), torch.float32):
        wrong.append(repr(norm))
    if abs(norm.item() - expected.item()) > 3e-6 * expected.item():
        wrong.append(f"norm {norm.item()} is not {expected.item()}")
    factor = 1.0 if case.max_norm is None else min(1.0, case.max_norm / (expected.item() + 1e-6))
    for index, (drawn, parameter) in enumerate(zip(case.parameters, parameters, strict=True)):
        if parameter.grad is not None:
            before, tolerance = _local_gradient(drawn, meshes).double(), 1e-2 if drawn.dtype == "bfloat16" else 1e-5
            after = getattr(parameter.grad, "to_local", lambda p=parameter: p.grad)().double()
            if not torch.allclose(after, before * factor, rtol=tolerance, atol=1e-12):
                wrong.append(f"gradient {index} is not scaled by {factor}")
    return wrong


def _placement(letter):
    from torch.distributed.tensor import Partial, Replicate, Shard

    return {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "P": Partial()}[letter]


def _values(drawn, rank=0):
    import torch

    generator = torch.Generator().manual_seed(drawn.seed * WORLD + rank)
    return torch.randn(drawn.shape, generator=generator).to(getattr(torch, drawn.dtype))


def _part(drawn, meshes, whole, coordinate):
    """What the rank there holds of the whole, by torch.chunk alone."""
    for letter, size, index in zip(drawn.placements, meshes[drawn.mesh].shape, coordinate, strict=True):
        if letter in ("S0", "S1"):
            dim = int(letter[1])
            length = -(-whole.size(dim) // size)
            whole = whole.narrow(dim, min(index * length, whole.size(dim)), _length(whole.size(dim), length, index))
    return whole


def _length(total, length, index):
    return max(0, min(length, total - index * length))


def _local_gradient(drawn, meshes):
    """What this rank has; Partial gradients are a quarter or half of the whole on each rank, exactly."""
    import torch.distributed as dist

    if drawn.mesh is None:
        return _values(drawn, dist.get_rank() if drawn.local else 0)
    mesh = meshes[drawn.mesh]
    sharers = math.prod(size for letter, size in zip(drawn.placements, mesh.shape, strict=True) if letter == "P")
    return _part(drawn, meshes, _values(drawn), mesh.get_coordinate()) / sharers


def _make(drawn, meshes):
    """The parameter of this rank, and the parts of its gradient that exist anywhere, each once."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import DTensor

    here = dist.get_rank() not in drawn.missing
    gradient = _local_gradient(drawn, meshes).contiguous()
    if drawn.mesh is None:
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone() if here else None
        ranks = [rank for rank in range(WORLD) if rank not in drawn.missing] if drawn.local else [0]
        return parameter, [_values(drawn, rank) for rank in ranks]
    mesh = meshes[drawn.mesh]
    layout = {"shape": torch.Size(drawn.shape), "stride": (drawn.shape[1], 1), "run_check": False}
    owned = [_placement("R" if letter == "P" else letter) for letter in drawn.placements]
    parameter = nn.Parameter(DTensor.from_local(torch.zeros_like(gradient), mesh, owned, **layout))
    if here:
        placements = [_placement(letter) for letter in drawn.placements]
        parameter.grad = DTensor.from_local(gradient.clone(), mesh, placements, **layout)
    once = {}
    for rank in range(WORLD):
        if rank not in drawn.missing:
            coordinate = (mesh.mesh == rank).nonzero()[0].tolist()
            once[tuple(i for letter, i in zip(drawn.placements, coordinate, strict=True) if letter[0] == "S")] = _part(
                drawn, meshes, _values(drawn), coordinate
            )
    return parameter, list(once.values())


@st.composite
def drawn_parameters(draw):
    mesh = draw(st.sampled_from([None, *MESHES]))
    letters = ["R", "S0", "S1", "P"]
    placements = () if mesh is None else tuple(draw(st.sampled_from(letters)) for _ in MESHES[mesh])
    local = mesh is None and draw(st.booleans())
    # a rank may lack what it alone has; a replica or a part of a sum that is missing would be another gradient
    own = local or (mesh is not None and _fully_sharded(placements, MESHES[mesh]))
    missing = draw(st.sets(st.integers(0, WORLD - 1))) if own else set()
    return Drawn(
        mesh=mesh,
        placements=placements,
        shape=(draw(st.integers(1, 9)), draw(st.integers(1, 5))),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        local=local,
        missing=tuple(sorted(missing)),
        seed=draw(st.integers(0, 999)),
    )


def _fully_sharded(placements, shape):
    return all(letter[0] == "S" or size == 1 for letter, size in zip(placements, shape, strict=True))


# not shrunk: every failure restarts the ranks, and what is reported are single cases already
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    st.lists(
        st.builds(
            Case,
            parameters=st.lists(drawn_parameters(), min_size=1, max_size=6).map(tuple),
            norm_type=st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, math.inf]),
            foreach=st.sampled_from([None, True, False]),
            max_norm=st.sampled_from([None, 0.0, 0.5, 3.0, math.inf]),
        ),
        min_size=10,
        max_size=10,
    )
)
def test_whatever_hypothesis_draws(cases):
    assert run_ranks(errors, WORLD, cases, timeout=60) == [[]] * WORLD
