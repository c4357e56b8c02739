"""The components that are this model's own: ("model", "nemotron_nano") and ("transform", "compiled"). No torch."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from moe_core.plugins import Problem, Selected, component_field
from nemotron_nano.mamba.kernels import MambaKernels, kernel_faults
from nemotron_nano.model_config import BLOCK_KINDS, Fault, NemotronNanoConfig, NemotronNanoConfigError, presets

if TYPE_CHECKING:
    from torch import nn

    from moe_core.plugins import Run
    from nemotron_nano.model import NemotronNano

_OVERRIDES: list[Any] = [field for field in attrs.fields(NemotronNanoConfig) if not field.name.endswith("_token_id")]


def _with_overrides(_: type, fields: list["attrs.Attribute[Any]"]) -> list["attrs.Attribute[Any]"]:
    """The config class's own fields, then all that describe a model's shape, which nothing set leaves as it is."""
    unset = {"default": None, "validator": None, "alias": None, "inherited": False}
    return fields + [field.evolve(type=field.type | None, **unset) for field in _OVERRIDES]


@attrs.frozen(kw_only=True, field_transformer=_with_overrides)
class NemotronNanoModelConfig:
    """Which Nemotron-Nano to build: a preset or a Hugging Face config, and what to change in it.

    It has every field of `NemotronNanoConfig` besides, None where the model's own value stays. `num_experts` then
    holds the model's number: the mesh reads it.
    """

    preset: str = attrs.field(default="tiny", validator=attrs.validators.in_(tuple(presets)))
    """tiny, small, nano-16l or nano-30b-a3b."""
    from_hf: str | None = None
    """A Hugging Face `config.json`, or a folder with one, to take the sizes from instead of the preset."""
    grouped_gemm: Selected | None = component_field("grouped_gemm")
    """What computes the experts' matrix products. Left out: grouped_mm or loop, by dtype and device."""
    mamba_kernels: MambaKernels = "torch"
    """What runs Mamba's convolution and scan. "cuda" needs the extra `cuda` and a CUDA device."""

    def __attrs_post_init__(self) -> None:
        if self._changes().get("num_experts") is not None:
            return
        try:
            model = self.resolve()
        except NemotronNanoConfigError:
            return  # `problems` says what is wrong
        if "E" in model.pattern:
            object.__setattr__(self, "num_experts", model.num_experts)

    def _changes(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in _OVERRIDES}
        return {name: value for name, value in values.items() if value is not None}

    def resolve(self) -> NemotronNanoConfig:
        """The model that this describes.

        Raises:
            NemotronNanoConfigError: the values do not go together, or `from_hf` cannot be read.
        """
        base = presets[self.preset] if self.from_hf is None else NemotronNanoConfig.from_hf(_read(self.from_hf))
        return attrs.evolve(base, **self._changes())


def _read(path: str) -> Any:
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise NemotronNanoConfigError([Fault("from_hf", path, f"cannot be read: {error}")]) from error
    if not isinstance(config, dict):
        raise NemotronNanoConfigError([Fault("from_hf", path, "does not hold a Hugging Face config")])
    return config


def problems(config: NemotronNanoModelConfig, device_type: str = "auto") -> list[Problem]:
    """What keeps a model from being built of this config on such a device, for the plugin's `moe_validate`."""
    try:
        faults = [*kernel_faults(config.resolve(), config.mamba_kernels, device_type)]
    except NemotronNanoConfigError as error:
        faults = error.faults
    return [Problem(f"model.{fault.key}", fault.rule, fault.value) for fault in faults]


def build_model(config: NemotronNanoModelConfig, run: "Run") -> "NemotronNano":
    """The model on the meta device; the trainer gives it memory and calls `init_weights`.

    Raises:
        NemotronNanoConfigError: its kernels cannot run on the run's device, or a package of theirs is missing.
    """
    from nemotron_nano.model import NemotronNano

    model = config.resolve()
    grouped_gemm = "auto" if config.grouped_gemm is None else config.grouped_gemm.build(run)
    try:
        if faults := [*kernel_faults(model, config.mamba_kernels, run.device_type)]:
            raise NemotronNanoConfigError(faults)
        return NemotronNano(model, grouped_gemm=grouped_gemm, mamba_kernels=config.mamba_kernels, device="meta")
    except NemotronNanoConfigError as error:
        faults = [fault._replace(key=f"model.{fault.key}") for fault in error.faults]
        raise NemotronNanoConfigError(faults) from error


def _known_kinds(_: object, attribute: "attrs.Attribute[str]", value: str) -> None:
    if unknown := sorted(set(value) - set(BLOCK_KINDS)):
        letters = ", ".join(f"{letter!r} {name}" for letter, name in BLOCK_KINDS.items())
        raise ValueError(f"{attribute.name} = {value!r}: unknown letter {unknown[0]!r}; letters: {letters}")


@attrs.frozen
class CompiledConfig:
    """Which blocks to compile; stands before activation checkpointing and FSDP."""

    kinds: str = attrs.field(default="M*-", validator=_known_kinds)
    """Letters of the pattern. A block with experts (E) is cut into several graphs: it reads counts on the host."""
    backend: str = "inductor"
    """torch.compile's backend."""
    dynamic: bool | None = None
    """Graphs for any number of tokens; unset: only once that number has changed."""


def compile_blocks(
    model: "NemotronNano", kinds: str = "M*-", *, backend: str = "inductor", dynamic: bool | None = None
) -> "NemotronNano":
    """Compile the forward pass of each block whose letter is among `kinds`, in place.

    Blocks of a kind share their graphs, since parameters are inputs of a graph. Apply it before activation
    checkpointing and FSDP, whose hooks then stay outside of the graphs.
    """
    import torch

    for letter, layer in zip(model.config.pattern, model.backbone.layers, strict=True):
        if letter in kinds:
            layer.forward = torch.compile(layer.forward, backend=backend, dynamic=dynamic)
    return model


def build_compiled(config: CompiledConfig, run: "Run") -> "nn.Module":
    """`run.model` with its blocks compiled.

    Raises:
        ValueError: the model is another kind of model.
    """
    from nemotron_nano.model import NemotronNano

    if not isinstance(run.model, NemotronNano):
        raise ValueError(
            f'transform.compiled: the model is a {type(run.model).__name__}; it compiles "nemotron_nano" only'
        )
    return compile_blocks(run.model, config.kinds, backend=config.backend, dynamic=config.dynamic)
