"""Which process groups a tensor is divided over, so that each part of it is counted once."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Ranks = tuple[int, ...]
"""A process group by its members: groups of other meshes or names with the same members are the same."""


@dataclass(frozen=True)
class Group:
    """A process group, and the kind of device whose tensors it reduces (None: that of the gradients)."""

    process_group: dist.ProcessGroup
    device_type: str | None


class Groups:
    """The existing groups that norms are reduced over. Creates none: that would be collective, and slow."""

    def __init__(self) -> None:
        self._groups: dict[Ranks, Group] = {}
        self._axes: dict[Ranks, tuple[DeviceMesh, int]] = {}
        """Where each group can be had. It is asked for when it is needed: a mesh may outlive groups of others."""
        self._known: dict[tuple[int, tuple[bool, ...]], tuple[Ranks, ...]] = {}
        self._meshes: dict[int, DeviceMesh] = {}

    def __getitem__(self, ranks: Ranks) -> Group:
        if ranks not in self._groups:
            mesh, axis = self._axes[ranks]
            self._groups[ranks] = Group(mesh.get_group(axis), mesh.device_type)
        return self._groups[ranks]

    def dividing(self, mesh: DeviceMesh, placements: Sequence[Any]) -> tuple[Ranks, ...]:
        """The groups to sum over, one after the other, for a tensor with these placements.

        Replicas do not count, neither do axes of one rank. Several axes are taken together where a group of
        just their ranks exists: experts on (dp_shard_mod_ep, ep) are summed over dp_shard.
        """
        divided = tuple(not placement.is_replicate() for placement in placements)
        key = (id(mesh), divided)
        if key not in self._known:
            self._learn(mesh)
            self._known[key] = self._resolve(mesh, [axis for axis, shared in enumerate(divided) if shared])
        return self._known[key]

    def _learn(self, mesh: DeviceMesh) -> None:
        """Take note of the groups of `mesh`, and of the flattened meshes that lie beside it."""
        if id(mesh) in self._meshes:
            return
        self._meshes[id(mesh)] = mesh  # kept, so that no other mesh can have this id
        root = mesh._get_root_mesh()
        for other in (mesh, root, *root._flatten_mapping.values()):
            if other.get_coordinate() is None:
                continue
            for axis in range(other.ndim):
                ranks = _ranks_along(other, [axis])
                if len(ranks) > 1:
                    self._axes.setdefault(ranks, (other, axis))

    def _resolve(self, mesh: DeviceMesh, axes: list[int]) -> tuple[Ranks, ...]:
        if mesh.get_coordinate() is None:
            return ()
        axes = [axis for axis in axes if mesh.size(axis) > 1]
        together = _ranks_along(mesh, axes)
        if together in self._groups or together in self._axes:
            return (together,)
        if (world := dist.group.WORLD) is not None and len(together) == world.size() and len(axes) > 1:
            self._groups[together] = Group(world, mesh.device_type)
            return (together,)
        return tuple(_ranks_along(mesh, [axis]) for axis in axes)


def _ranks_along(mesh: DeviceMesh, axes: list[int]) -> Ranks:
    """The ranks that share this rank's coordinates in all axes but these, sorted."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return _ranks_through(mesh, tuple(coordinate), tuple(axes))


@functools.lru_cache(maxsize=256)
def _ranks_through(mesh: DeviceMesh, coordinate: tuple[int, ...], axes: tuple[int, ...]) -> Ranks:
    ranks = mesh.mesh
    for axis in reversed(range(mesh.ndim)):
        if axis not in axes:
            ranks = ranks.select(axis, coordinate[axis])
    members = tuple(sorted(ranks.flatten().tolist()))
    assert len(members) == math.prod(mesh.size(axis) for axis in axes)
    return members
