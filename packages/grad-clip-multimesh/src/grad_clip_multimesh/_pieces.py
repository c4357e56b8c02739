"""What this rank holds of each tensor, and the process groups that the rest is divided over: all counts once."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

Ranks = tuple[int, ...]
"""A process group by its members: groups of other meshes or names with the same members are the same."""
LocalTo = Mapping[Tensor, DeviceMesh]
"""Tensors that differ from rank to rank of a mesh without saying so, such as the experts of this rank."""


@dataclass(frozen=True)
class Group:
    """A process group, and the kind of device whose tensors it reduces."""

    process_group: dist.ProcessGroup
    device_type: str


class Groups:
    """The existing groups that norms are reduced over. Creates none: that would be collective, and slow."""

    def __init__(self) -> None:
        self._groups: dict[Ranks, Group] = {}
        self._known: dict[tuple[int, tuple[Placement, ...]], tuple[Ranks, ...]] = {}
        self._lines: dict[int, tuple[Ranks, ...]] = {}
        self._meshes: list[DeviceMesh] = []

    def __getitem__(self, ranks: Ranks) -> Group:
        return self._groups[ranks]

    def learn(self, mesh: DeviceMesh) -> None:
        """Take note of the groups of `mesh`, and of those of the flattened meshes that lie beside it."""
        if id(mesh) in self._lines:
            return
        self._meshes.append(mesh)  # kept, so that no other mesh can have this id
        inside = mesh.get_coordinate() is not None
        self._lines[id(mesh)] = tuple(self._note(mesh, axis) for axis in range(mesh.ndim)) if inside else ()
        root = mesh._get_root_mesh()
        for other in (root, *root._flatten_mapping.values()):
            if other is not mesh and other.get_coordinate() is not None:
                for axis in range(other.ndim):
                    try:
                        self._note(other, axis)
                    except (RuntimeError, KeyError):
                        # a mesh that is kept may outlive its groups; these are asked for in case they help
                        continue

    def dividing(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[Ranks, ...]:
        """The groups to sum over, one after the other, for a tensor with these placements.

        Replicas do not count, neither do axes of one rank, nor Partial ones, which are reduced before. Several
        axes are taken together where a mesh of just their ranks has been learned of: experts on (dp_shard_mod_ep,
        ep) are summed over dp_shard. Otherwise one comes after the other, as in DTensor.
        """
        key = (id(mesh), tuple(placements))
        if key not in self._known:
            self._known[key] = self._resolve(mesh, placements)
        return self._known[key]

    def local_to(self, mesh: DeviceMesh, divided_over: tuple[Ranks, ...] = ()) -> tuple[Ranks, ...]:
        """The groups of a tensor that differs from rank to rank of `mesh`, and is divided over others already."""
        others = self.dividing(mesh, [Shard(0)] * mesh.ndim)
        for one, other in product(divided_over, others):
            if len(set(one) & set(other)) > 1:
                raise ValueError(
                    f"local_to = {mesh}: the DTensor's own mesh divides it over the ranks {one} already, which meet "
                    f"{other} in more than one; name only the axes that its mesh lacks"
                )
        lines = (*divided_over, *others)
        return self._everyone(lines) or lines

    def _note(self, mesh: DeviceMesh, axis: int) -> Ranks:
        """The ranks along one axis. Asked of the group: a mesh would read them from a tensor."""
        process_group = mesh.get_group(axis)
        ranks = tuple(sorted(dist.get_process_group_ranks(process_group)))
        if len(ranks) > 1:
            self._groups.setdefault(ranks, Group(process_group, mesh.device_type))
        return ranks

    def _resolve(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[Ranks, ...]:
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return ()
        axes = tuple(
            axis
            for axis, placement in enumerate(placements)
            if mesh.size(axis) > 1 and not (placement.is_replicate() or placement.is_partial())
        )
        lines = tuple(self._lines[id(mesh)][axis] for axis in axes)
        if len(lines) < 2:
            return lines
        if everyone := self._everyone(lines):
            return everyone
        size = math.prod(map(len, lines))
        if any(len(ranks) == size and set(ranks).issuperset(*lines) for ranks in self._groups):
            together = _ranks_through(mesh, tuple(coordinate), axes)
            if together in self._groups:
                return (together,)
        return lines

    def _everyone(self, lines: tuple[Ranks, ...]) -> tuple[Ranks, ...]:
        """All ranks, if these span them and a mesh has a group of them."""
        ranks = tuple(range(dist.get_world_size()))
        return (ranks,) if math.prod(map(len, lines)) == len(ranks) and ranks in self._groups else ()


@functools.lru_cache(maxsize=256)
def _ranks_through(mesh: DeviceMesh, coordinate: tuple[int, ...], axes: tuple[int, ...]) -> Ranks:
    """The ranks that share this coordinate in all axes but these, sorted."""
    ranks = mesh.mesh
    for axis in reversed(range(mesh.ndim)):
        if axis not in axes:
            ranks = ranks.select(axis, coordinate[axis])
    return tuple(sorted(ranks.flatten().tolist()))


@dataclass(frozen=True)
class Piece:
    """What this rank holds of one tensor, and the groups that hold the rest."""

    held: Tensor | None
    """The local tensor itself. None: this rank has no gradient, others may have."""
    tensor: Tensor | None
    """The same, with what was Partial reduced."""
    divided_over: tuple[Ranks, ...]
    local: bool
    """Other ranks may have more or fewer of these."""


def find_pieces(
    owners: Sequence[Tensor], gradients: Sequence[Tensor | None], groups: Groups, local_to: LocalTo
) -> list[Piece]:
    """Where an owner lies decides, not its gradient: every rank has the first, and must reduce alike."""
    known = set(map(id, owners)) if local_to else ()
    for tensor in local_to:
        if id(tensor) not in known:
            # a key that is no longer a parameter would make the experts count as replicated
            raise ValueError(
                f"local_to has a tensor of shape {list(tensor.shape)} that is not among those whose norm is taken: "
                "name the very objects that are passed (after `fully_shard`, which replaces parameters; "
                "for `get_total_norm` the gradients)"
            )
    for mesh in [owner.device_mesh for owner in owners if isinstance(owner, DTensor)] + list(local_to.values()):
        groups.learn(mesh)
    # all of them before the first Partial gradient is reduced: errors come before communication
    divisions = [_division(owner, groups, local_to) for owner in owners]
    return [
        Piece(*_local_parts(gradient, owner), divided_over, bool(local_to) and owner in local_to)
        for owner, gradient, divided_over in zip(owners, gradients, divisions, strict=True)
    ]


def _division(owner: Tensor, groups: Groups, local_to: LocalTo) -> tuple[Ranks, ...]:
    divided_over: tuple[Ranks, ...] = ()
    if isinstance(owner, DTensor):
        divided_over = groups.dividing(owner.device_mesh, owner.placements)
    return groups.local_to(local_to[owner], divided_over) if local_to and owner in local_to else divided_over


def _local_parts(gradient: Tensor | None, owner: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What is held of a gradient, and what its norm is taken of."""
    if not isinstance(gradient, DTensor):
        return gradient, gradient
    held = gradient.to_local()
    if isinstance(owner, DTensor):
        placements = tuple(Replicate() if p.is_partial() else p for p in owner.placements)
        if gradient.placements != placements:
            # a Partial gradient is the sum of what the ranks hold; its norm is not the sum of theirs
            return held, gradient.redistribute(placements=placements).to_local()
    return held, held
