"""The kinds of components: what the factory of each one is given, and what it returns, with shapes.

Every factory is called as `factory(config, run)`; see `Run`, at the end, for what it may read.
Letters: B sequences on this rank, S tokens in a sequence, T = B*S, D model dim, V vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from moe_core.plugins._config import Config

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

KINDS = (
    "mesh", "model", "transform", "dispatcher", "grouped_gemm", "loss", "optimizer", "scheduler", "clipper",
    "data", "checkpointer", "family", "tracker", "trainer",
)  # fmt: skip

TABLES: Mapping[str, str] = {
    "mesh": "device_mesh",
    "model": "nemotron_nano",
    "loss": "chunked_clm_cross_entropy",
    "optimizer": "adamw",
    "scheduler": "warmup_cosine",
    "clipper": "multi_mesh",
    "data": "python_stdlib",
    "checkpointer": "dcp",
    "trainer": "pretrain",
}
"""Kinds that a config selects one of, as a table of that name; with the `type` taken where it names none."""

ARRAYS: Mapping[str, tuple[str, ...]] = {"transform": (), "tracker": ("console", "jsonl")}
"""Kinds that a config selects any number of, as an array of tables; with what is taken where there is none.

The kinds in neither appear as sub-tables of another component (`moe_core.plugins.component_field`).
"""


class Batch(NamedTuple):
    """One microbatch of this rank."""

    tokens: "Tensor"
    """[B, S] int64, what the model reads."""
    labels: "Tensor"
    """[B, S] int64, aligned with `tokens`: `labels[b, s]` is the token after `tokens[b, s]`; -100 counts nowhere."""
    document_ids: "Tensor | None" = None
    """[B, S] int64: positions of different documents never see each other. None: one document a row."""


class LossOutput(NamedTuple):
    """What a loss makes of one microbatch. The trainer divides `sum` by the step's denominator."""

    sum: "Tensor"
    """[] fp32 with a graph: the sum over this rank's valid tokens, auxiliary terms included."""
    tokens: "Tensor"
    """[] int64: how many valid tokens that are."""
    parts: "Mapping[str, Tensor]"
    """[] fp32, detached sums over the same tokens, to be reported apart: `cross_entropy`, `z_loss`, ..."""


class Model(Protocol):
    """model, transform: an `nn.Module` on the meta device with these methods besides.

    A transform gets it as `run.model` and returns it, changed in place or wrapped. A model's config may
    have an int attribute `num_experts`, which the mesh checks the EP degree against. It may also have a method
    `auxiliary_losses()`: what the last forward pass in training mode adds to the loss, by name, as sums over
    this rank's tokens ([] fp32 with a graph), to be divided by the step's denominator like the loss itself; and
    `flops_per_token(sequence_length)`, of a forward and backward pass, from which a trainer can tell MFU.
    """

    def forward(self, tokens: "Tensor", *, document_ids: "Tensor | None" = None, return_hidden: bool = False) -> Any:
        """[B, S] int64 -> logits [B, S, V] fp32, or with `return_hidden` the head's input [B, S, D]."""
        ...

    def init_weights(self, seed: int) -> None:
        """Fill every parameter and buffer, already on its device and sharded, from `seed` alone.

        The same seed gives the same global weights under every layout.
        """
        ...


@runtime_checkable
class Dispatched(Protocol):
    """Tokens on their way to their experts; complete after `wait()`."""

    @property
    def rows(self) -> "Tensor":
        """[R, D], grouped by local expert; what lies past the last expert's rows belongs to none."""
        ...

    @property
    def tokens_per_expert(self) -> "Tensor":
        """[e] int64, on the device of `rows`."""
        ...

    @property
    def handle(self) -> Any: ...

    def wait(self) -> "Dispatched": ...


class Dispatcher(Protocol):
    """dispatcher: brings tokens to their experts and the results home, in two phases."""

    def dispatch(self, hidden: "Tensor", expert_ids: "Tensor", num_experts: int) -> Dispatched:
        """[T, D], [T, K] int64 (`num_experts` = sends nothing) -> rows grouped by local expert."""
        ...

    def combine(self, rows: "Tensor", expert_weights: "Tensor", handle: Any) -> "Tensor":
        """[R, D], [T, K] -> [T, D]: weights applied at home in fp32, experts in the order of K."""
        ...


class GroupedGemm(Protocol):
    """grouped_gemm: one matrix product per expert over consecutive rows."""

    def __call__(self, rows: "Tensor", weight: "Tensor", tokens_per_expert: "Tensor") -> "Tensor":
        """[R, I], [e, O, I], [e] int64 -> [R, O]; rows past the last expert's come out as zeros."""
        ...


class Loss(Protocol):
    """loss: runs the model on a batch, so that it may call the head itself."""

    def __call__(self, model: "torch.nn.Module", batch: Batch) -> LossOutput: ...


class Clipper(Protocol):
    """clipper: scales the gradients in place."""

    def __call__(self, parameters: "Iterable[torch.nn.Parameter]") -> "Tensor":
        """Returns the norm before clipping: [] fp32, plain, equal on all ranks."""
        ...


class Data(Protocol):
    """data: batches as a function of the step, so that a step number is all the position there is.

    One with an attribute `files`, a mapping of names to paths, has them copied into every checkpoint: its tokenizer.
    """

    def train_batches(self, step: int) -> Sequence[Batch]:
        """This rank's microbatches of optimizer step `step` (from 0); as many on every rank."""
        ...

    def validation_batches(self) -> Sequence[Batch]:
        """This rank's share of the validation set; as many batches on every rank, padded with ignored labels."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """What to print and to store at the start: sizes, digest."""
        ...


class Checkpointer(Protocol):
    """checkpointer: all ranks call these together."""

    def save(self, run: "Run", step: int, state: Mapping[str, Any]) -> "Path":
        """Store model, optimizer, scheduler and `state` (what JSON can hold) as the state after `step` steps."""
        ...

    def latest_step(self) -> int | None:
        """The newest step that is stored whole; None if there is none. Any rank may ask alone."""
        ...

    def load(self, run: "Run", step: int | None = None) -> Mapping[str, Any] | None:
        """Restore in place the given or the latest step; returns its `state` with `step`, None if there is none."""
        ...


class Tracker(Protocol):
    """tracker: any of these, called with keyword arguments on every rank. So may any other component."""

    def run_start(self, *, run: "Run", **info: Any) -> None: ...
    def step_end(self, *, step: int, metrics: Mapping[str, Any], **info: Any) -> None: ...
    def evaluated(self, *, step: int, metrics: Mapping[str, Any], **info: Any) -> None: ...
    def checkpoint_saved(self, *, step: int, path: "Path", **info: Any) -> None: ...
    def run_end(self, *, status: int, **info: Any) -> None: ...


Trainer = Callable[["Run"], int]
"""trainer: drives a built run to its end; returns the exit status."""


ORDER = (
    "config", "mesh", "model", "loss", "optimizer", "scheduler", "clipper", "data", "checkpointer", "trackers",
)  # fmt: skip
"""The order in which a run is built. Transforms replace `model`, before the loss is built."""


class RunOrderError(RuntimeError):
    """A factory read a part of the run that is built after it."""


class Run:
    """What is built of a run so far; frozen: `with_part` returns a longer one.

    A factory may read only what stands before it in `ORDER`; anything later raises `RunOrderError`.
    """

    config: Config
    mesh: "DeviceMesh"
    model: "torch.nn.Module"
    loss: "Loss"
    optimizer: "torch.optim.Optimizer"
    scheduler: "torch.optim.lr_scheduler.LRScheduler"
    clipper: "Clipper"
    data: "Data"
    checkpointer: "Checkpointer"
    trackers: "tuple[Tracker, ...]"

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
        config: Config,
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
