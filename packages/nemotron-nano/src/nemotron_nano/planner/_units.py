"""The FSDP units of a model under a layout, and what each of them gathers and reduces.

The modules are those that fsdp-ep and ep-dispatch find in the model on the meta device; nothing about them is
repeated here but where the experts' mesh differs.
"""

import math
from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import nn

from ep_mesh import MeshConfig
from fsdp_ep import find_embedding
from fsdp_ep import find_units as find_fsdp_units
from nemotron_nano.model import NemotronNano
from nemotron_nano.planner._inputs import Workload


@attrs.frozen(kw_only=True)
class Unit:
    """Parameters that travel together."""

    name: str
    """"experts", "fp32", "block", "embedding", "head" or "root"."""
    block: int | None = None
    """Which block it is, or lies in."""
    shapes: tuple[tuple[int, ...], ...]
    """Of its parameters as they are before FSDP cuts them: of this rank's experts, where those are split."""
    shard: int
    """Ranks of the axis that it is cut over."""
    replicas: int
    stride: int
    """Ranks from one of the shard axis to the next."""
    element: int
    """Bytes of a number as it is gathered."""
    reduced_element: int
    gathers: int
    """All-gathers of a microbatch."""
    gathers_once: bool = False
    """The gather of the first microbatch serves the whole step."""

    @property
    def sharded(self) -> int:
        """Numbers that a rank holds, padded to the largest share of each parameter."""
        return sum(-(-shape[0] // self.shard) * math.prod(shape[1:]) for shape in self.shapes)

    @property
    def gathered(self) -> int:
        """Numbers in the buffer that it is gathered into."""
        return self.sharded * self.shard

    @property
    def numel(self) -> int:
        """Numbers without padding."""
        return sum(map(math.prod, self.shapes))

    def gathers_of_a_step(self, microbatches: int) -> int:
        return self.gathers if self.gathers_once else self.gathers * microbatches


def expert_share(num_experts: int, ep: int, ep_rank: int = 0) -> int:
    """e: `Shard(0)` splits like `torch.chunk`; no rank has more than the first."""
    size = -(-num_experts // ep)
    return max(0, min(size, num_experts - ep_rank * size))


def find_units(model: NemotronNano, work: Workload, mesh: MeshConfig, ep_rank: int = 0) -> list[Unit]:
    """What `fully_shard_moe` makes of the model under a resolved mesh, in the order of the forward pass; experts and
    fp32 modules before the block that they lie in, the root first.
    """
    found = find_fsdp_units(
        model,
        embedding=find_embedding(model),
        param_dtype=getattr(torch, work.param_dtype),
        separate_lm_head=work.separate_lm_head,
    )
    blocks, islands, embedding, head = found.blocks, found.islands, found.embedding, found.head
    experts = _find_experts(model) if mesh.ep > 1 else []
    units_of = {id(module) for module in [*blocks, *experts, *islands, embedding, head] if module is not None}
    reshards = 2 if work.reshard_after_forward else 1
    shared: dict[str, Any] = {
        "replicas": mesh.dp_replicate,
        "element": work.param_bytes,
        "reduced_element": work.reduce_bytes,
    }
    dense: dict[str, Any] = {"shard": mesh.dp_shard, "stride": 1, **shared}
    split: dict[str, Any] = {"shard": mesh.dp_shard // mesh.ep, "stride": mesh.ep, **shared}

    units = [Unit(name="root", shapes=_own([model], units_of), gathers=1, **dense)]
    if islands:
        # not cast, and not freed between forward and backward
        shapes = tuple(tuple(p.shape) for module in islands for p in module.parameters())
        units.append(Unit(name="fp32", shapes=shapes, gathers=1, **{**dense, "element": 4}))
    if embedding is not None:
        units.append(Unit(name="embedding", shapes=_own([embedding], units_of), gathers=reshards, **dense))
    for index, block in enumerate(blocks):
        for module in block.modules():
            if module in experts:
                share = expert_share(module.num_experts, mesh.ep, ep_rank)  # type: ignore[arg-type]  # an int, by how it was found
                shapes = tuple((share, *p.shape[1:]) for p in module.parameters())
                units.append(Unit(name="experts", block=index, shapes=shapes, gathers=reshards, **split))
        units.append(Unit(name="block", block=index, shapes=_own([block], units_of), gathers=reshards, **dense))
    if head is not None:
        is_chunked = work.loss == "chunked_clm_cross_entropy"
        # FSDP reduces in the gradient's own dtype where it is told to reduce in the parameters', and this loss makes
        # an fp32 gradient
        wide = is_chunked and work.reduce_dtype == work.param_dtype
        how = {**dense, "reduced_element": 4 if wide else work.reduce_bytes}
        once = work.keep_head_unsharded and is_chunked
        units.append(Unit(name="head", shapes=_own([head], units_of), gathers=1, gathers_once=once, **how))
    return [unit for unit in units if unit.shapes]


def _find_experts(model: nn.Module) -> list[nn.Module]:
    """By the interface that ep-dispatch finds them by."""
    return [m for m in model.modules() if isinstance(getattr(m, "num_experts", None), int) and hasattr(m, "dispatcher")]


def _own(modules: Iterable[nn.Module], units: set[int]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the parameters of these modules that no inner unit has."""
    found: list[tuple[int, ...]] = []
    for module in modules:
        found += [tuple(p.shape) for p in module.parameters(recurse=False)]
        found += _own((child for child in module.children() if id(child) not in units), units)
    return tuple(found)
