"""The record that factories read: what of the run is built so far."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from moe_core.config import Config
    from moe_core.plugins import kinds

ORDER = (
    "config",
    "mesh",
    "model",
    "loss",
    "optimizer",
    "scheduler",
    "clipper",
    "data",
    "checkpointer",
    "trackers",
)
"""The order in which a run is built. Transforms replace `model`, before the loss is built."""


class RunOrderError(RuntimeError):
    """A factory read a part of the run that is built after it."""


class Run:
    """What is built of a run so far; frozen: `with_part` returns a longer one.

    A factory may read only what stands before it in `ORDER`; anything later raises `RunOrderError`.
    """

    config: "Config"
    mesh: "DeviceMesh"
    model: "torch.nn.Module"
    loss: "kinds.Loss"
    optimizer: "torch.optim.Optimizer"
    scheduler: "torch.optim.lr_scheduler.LRScheduler"
    clipper: "kinds.Clipper"
    data: "kinds.Data"
    checkpointer: "kinds.Checkpointer"
    trackers: "tuple[kinds.Tracker, ...]"

    world_size: int
    rank: int
    device_type: str
    """"cpu", "cuda", ...: the type of the mesh and of every tensor."""
    resume: bool
    """Whether the trainer goes on from the latest checkpoint."""
    _sub_mesh: Any
    _parts: Mapping[str, Any]

    def __init__(
        self,
        config: "Config",
        *,
        world_size: int = 1,
        rank: int = 0,
        device_type: str = "cpu",
        resume: bool = False,
        sub_mesh: Any = None,
        **parts: Any,
    ) -> None:
        unknown = set(parts) - set(ORDER)
        if unknown:
            raise ValueError(f"a run has no part called {', '.join(sorted(unknown))}; parts: {', '.join(ORDER)}")
        fields = {
            "world_size": world_size,
            "rank": rank,
            "device_type": device_type,
            "resume": resume,
            "_sub_mesh": sub_mesh,
            "_parts": MappingProxyType({"config": config, **parts}),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Run is frozen; use run.with_part({name!r}, ...)")

    def __getattr__(self, name: str) -> Any:
        if name not in ORDER:
            raise AttributeError(f"Run has no attribute {name!r}")
        try:
            return self._parts[name]
        except KeyError:
            order = " -> ".join(ORDER)
            raise RunOrderError(f"run.{name} is not built yet; a run is built in the order {order}") from None

    def with_part(self, name: str, value: Any) -> "Run":
        """This run with one more part, or with another `model`."""
        return Run(
            world_size=self.world_size,
            rank=self.rank,
            device_type=self.device_type,
            resume=self.resume,
            sub_mesh=self._sub_mesh,
            **{**self._parts, name: value},
        )

    def sub_mesh(self, name: "str | tuple[str, str]") -> "DeviceMesh":
        """The part of `mesh` called `name`: an axis, an alias (`dp_shard`, `dp`), or (outer, inner) of them."""
        return self._sub_mesh(self.mesh, name)
