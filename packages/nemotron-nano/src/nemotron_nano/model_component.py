"""The component ("model", "nemotron_nano"): its config, which needs no torch, and its factory."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from moe_core.plugins import Problem, Selected, component_field
from nemotron_nano._mamba_kernels import MambaKernels, kernel_faults
from nemotron_nano._presets import presets
from nemotron_nano.model_config import Fault, NemotronNanoConfig, NemotronNanoConfigError

if TYPE_CHECKING:
    from moe_core.plugins import Run
    from nemotron_nano.model import NemotronNano


@attrs.frozen
class NemotronNanoModelConfig:
    """Which Nemotron-Nano to build: a preset or a Hugging Face config, and what to change in it."""

    preset: str = attrs.field(default="tiny", validator=attrs.validators.in_(tuple(presets)))
    """tiny, small, nano-16l or nano-30b-a3b."""
    from_hf: str | None = None
    """A Hugging Face `config.json`, or a folder with one, to take the sizes from instead of the preset."""
    grouped_gemm: Selected | None = component_field("grouped_gemm")
    """What computes the experts' matrix products. Left out: grouped_mm or loop, by dtype and device."""
    mamba_kernels: MambaKernels = "torch"
    """What runs Mamba's convolution and scan. "cuda" needs the extra `cuda` and a CUDA device."""

    pattern: str | None = None
    """One letter a layer: M Mamba-2, E mixture of experts, * attention, - dense MLP."""
    vocab_size: int | None = None
    """V."""
    hidden_size: int | None = None
    """D, the width of the residual stream."""
    norm_eps: float | None = None
    """Added to the mean square in all norms."""
    num_attention_heads: int | None = None
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key and value heads; must divide the query heads."""
    head_dim: int | None = None
    """Width of an attention head."""
    mamba_num_heads: int | None = None
    """Mamba heads."""
    mamba_head_dim: int | None = None
    """Width of a Mamba head."""
    mamba_num_groups: int | None = None
    """Groups of Mamba heads that share B and C; must divide the heads."""
    ssm_state_size: int | None = None
    """N, state per channel of a Mamba head."""
    conv_kernel: int | None = None
    """Tokens that Mamba's convolution spans."""
    chunk_size: int | None = None
    """Tokens in a chunk of the Mamba scan: speed and memory only."""
    time_step_min: float | None = None
    """Smallest time step that `dt_bias` is drawn for."""
    time_step_max: float | None = None
    """Largest time step that `dt_bias` is drawn for."""
    time_step_floor: float | None = None
    """Time steps are drawn no smaller than this."""
    num_experts: int | None = None
    """E, experts in each MoE layer. Where it is left out it holds the model's own number: the mesh reads it."""
    top_k: int | None = None
    """K, experts per token."""
    expert_hidden_size: int | None = None
    """F, the width inside one expert."""
    shared_expert_hidden_size: int | None = None
    """The width inside the shared expert."""
    routed_scaling_factor: float | None = None
    """What a token's expert weights sum to."""
    normalize_top_k: bool | None = None
    """Divide the chosen scores by their sum."""
    router_num_groups: int | None = None
    """Groups of experts."""
    router_top_groups: int | None = None
    """Groups that a token may use."""
    aux_loss_coefficient: float | None = None
    """Weight of the sequence balance loss; 0: none."""
    z_loss_coefficient: float | None = None
    """Weight of the router's z-loss; 0: none."""
    mlp_hidden_size: int | None = None
    """The width of a dense MLP layer."""
    initializer_range: float | None = None
    """Standard deviation of the weights at the start."""
    initializer: Literal["megatron", "hf"] | None = None
    """Whose scheme draws the weights."""

    def __attrs_post_init__(self) -> None:
        if self.num_experts is not None:
            return
        try:
            model = self.resolve()
        except NemotronNanoConfigError:
            return  # `problems` says what is wrong
        if "E" in model.pattern:
            object.__setattr__(self, "num_experts", model.num_experts)

    def resolve(self) -> NemotronNanoConfig:
        """The model that this describes.

        Raises:
            NemotronNanoConfigError: the values do not go together, or `from_hf` cannot be read.
        """
        base = presets[self.preset] if self.from_hf is None else NemotronNanoConfig.from_hf(_read(self.from_hf))
        changes = {name: getattr(self, name) for name in _OVERRIDES if getattr(self, name) is not None}
        return attrs.evolve(base, **changes)


_OVERRIDES = tuple(field.name for field in attrs.fields(NemotronNanoConfig) if not field.name.endswith("_token_id"))


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
