"""What a plan is made from: the step that a config describes, and the machines that it is to run on. No torch."""

import re
from typing import Any

import attrs

from ep_mesh import MeshConfig
from moe_core.config import Config
from nemotron_nano.components import NemotronNanoModelConfig
from nemotron_nano.model_config import NemotronNanoConfig

BYTES = {"float32": 4, "bfloat16": 2}

GIB = 2**30

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


class PlanError(ValueError):
    """A value that no plan can be made of: says which, and the rule that it breaks."""

    def __init__(self, key: str, value: object, rule: str) -> None:
        super().__init__(f"{key} = {value!r}: {rule}")
        self.key = key
        self.value = value
        self.rule = rule

    def __reduce__(self) -> tuple[type["PlanError"], tuple[str, object, str]]:
        return type(self), (self.key, self.value, self.rule)


def _is_positive(_: object, attribute: "attrs.Attribute[Any]", value: float) -> None:
    if not value > 0:
        raise PlanError(attribute.name, value, "must be above 0")


@attrs.frozen(kw_only=True)
class Hardware:
    """GPUs all alike, in nodes all alike."""

    memory: float = attrs.field(default=80 * GIB, validator=_is_positive)
    """Bytes of one GPU's memory."""
    reserve: float = 2 * GIB
    """Bytes of it that driver, communicators and fragmentation take; a plan that needs them does not fit."""
    tflops: float = attrs.field(default=800.0, validator=_is_positive)
    """10^12 operations a second that one GPU reaches in large matrix products; MFU is relative to it."""
    intra: float = attrs.field(default=450e9, validator=_is_positive)
    """Bytes a second that one GPU sends to others of its node."""
    link: float = attrs.field(default=50e9, validator=_is_positive)
    """Bytes a second that one GPU sends to other nodes."""
    gpus_per_node: int = attrs.field(default=8, validator=_is_positive)


def parse_bytes(text: str) -> float:
    """ "80GiB", "300GB/s", "5e10" -> bytes (a second); G is 10^9, Gi is 2^30.

    Raises:
        PlanError: not a number with one of these units.
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgt]i?)?b?(?:/s)?", text.strip(), re.IGNORECASE)
    try:
        if match is not None:
            return float(match[1]) * _UNITS[(match[2] or "").upper()]
    except ValueError:
        pass
    raise PlanError("size", text, "must be a number of bytes, such as 80GiB or 300GB/s")


@attrs.frozen(kw_only=True)
class Workload:
    """One optimizer step of the reference trainer."""

    config: Config
    model: NemotronNanoConfig
    mesh: MeshConfig
    """As configured: degrees may be -1."""
    rows: int
    """Rows of the step, over all ranks and microbatches."""
    sequence_length: int
    microbatches: int
    isolates_documents: bool
    splits_experts: bool
    """Whether a dispatcher can take tokens to other ranks."""
    check_splits: bool
    is_sharded: bool
    """Whether FSDP is among the transforms."""
    separate_lm_head: bool
    reshard_after_forward: bool
    param_dtype: str
    reduce_dtype: str
    checkpointing: str
    checkpointing_every: int
    loss: str
    """Name of its component, or of the one that it compiles."""
    loss_parts: int
    """Sums that the loss reports, auxiliary losses included."""
    keep_head_unsharded: bool
    clips: bool
    on_cpu: bool

    @property
    def param_bytes(self) -> int:
        return BYTES[self.param_dtype]

    @property
    def reduce_bytes(self) -> int:
        return BYTES[self.reduce_dtype]

    def rows_per_rank(self, ranks: int) -> int:
        """B, rows of one rank's microbatch.

        Raises:
            PlanError: they cannot be shared out.
        """
        parts = ranks * self.microbatches
        if self.rows % parts:
            rule = f"must be a multiple of {ranks} ranks x {self.microbatches} microbatches = {parts}"
            raise PlanError("data.global_batch_size", self.rows, rule)
        return self.rows // parts

    def is_checkpointed(self, block: int) -> bool:
        """Whether block number `block` frees its activations."""
        if self.checkpointing == "every_nth":
            return block % self.checkpointing_every == 0
        return self.checkpointing in ("full", "selective")


def read_workload(config: Config) -> Workload:
    """The numbers of a config whose tables are of the components that this project brings.

    Raises:
        PlanError: another component's cost is not known.
    """
    model, mesh, data = config["model"].config, config["mesh"].config, config["data"].config
    if not isinstance(model, NemotronNanoModelConfig):
        raise PlanError("model.type", config["model"].name, 'must be "nemotron_nano": no other cost is known')
    if not isinstance(mesh, MeshConfig):
        raise PlanError("mesh.type", config["mesh"].name, 'must be "device_mesh": no other layout is known')
    for key in ("sequence_length", "global_batch_size", "microbatches"):
        if not isinstance(getattr(data, key, None), int):
            raise PlanError(f"data.{key}", None, f'the component "{config["data"].name}" does not say it')
    transforms = {selected.name: selected.config for selected in config["transform"]}
    resolved = model.resolve()
    return Workload(
        config=config,
        model=resolved,
        mesh=mesh,
        rows=data.global_batch_size,
        sequence_length=data.sequence_length,
        microbatches=data.microbatches,
        isolates_documents=getattr(data, "isolate_documents", False),
        clips=config["clipper"].name == "multi_mesh",
        on_cpu=config.run.device_type == "cpu",
        **_of_dispatch(transforms),
        **_of_sharding(transforms),
        **_of_loss(config["loss"], resolved),
    )


def _of_dispatch(transforms: dict[str, Any]) -> dict[str, Any]:
    split = transforms.get("expert_parallelized")
    dispatcher = getattr(split, "dispatcher", None)
    travels = split is not None and (dispatcher is None or dispatcher.name == "all_to_all")
    return {
        "splits_experts": travels,
        "check_splits": bool(dispatcher is not None and getattr(dispatcher.config, "check_splits", False)),
    }


def _of_sharding(transforms: dict[str, Any]) -> dict[str, Any]:
    fsdp, checkpointing = transforms.get("fsdp"), transforms.get("activation_checkpointed")
    return {
        "is_sharded": fsdp is not None,
        "separate_lm_head": getattr(fsdp, "separate_lm_head", False),
        "reshard_after_forward": getattr(fsdp, "reshard_after_forward", True),
        "param_dtype": getattr(fsdp, "param_dtype", "float32"),
        "reduce_dtype": getattr(fsdp, "reduce_dtype", "float32"),
        "checkpointing": getattr(checkpointing, "mode", "none"),
        "checkpointing_every": getattr(checkpointing, "every", 1),
    }


def _of_loss(selected: Any, model: NemotronNanoConfig) -> dict[str, Any]:
    inner = innermost(selected)
    if inner.name not in ("clm_cross_entropy", "chunked_clm_cross_entropy"):
        raise PlanError("loss.type", inner.name, "its cost is not known")
    auxiliary = 0
    if "E" in model.pattern:
        auxiliary = sum(weight > 0 for weight in (model.aux_loss_coefficient, model.z_loss_coefficient))
    own = 2 if inner.name == "chunked_clm_cross_entropy" else 1  # with the count of correct tokens
    return {
        "loss": inner.name,
        "loss_parts": own + bool(inner.config.z_loss) + auxiliary,
        "keep_head_unsharded": getattr(inner.config, "keep_head_unsharded", False),
    }


def innermost(selected: Any) -> Any:
    """The loss that others, such as "compiled", wrap."""
    while getattr(selected.config, "inner", None) is not None:
        selected = selected.config.inner
    return selected
