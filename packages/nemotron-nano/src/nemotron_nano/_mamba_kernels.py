"""Which kernels Mamba's convolution and scan run on, and what that choice asks of a model. No torch."""

from collections.abc import Iterator
from typing import Literal

from nemotron_nano.model_config import Fault, NemotronNanoConfig

MambaKernels = Literal["torch", "cuda"]
"""Plain torch on any device, or those of causal-conv1d and mamba-ssm, which are written for CUDA alone."""

DEVICE_TYPE = "cuda"
"""torch's name for the devices that the second choice runs on."""

_CONV_WIDTHS = (2, 3, 4)
_CHANNELS_AT_ONCE = 8


def kernel_faults(config: NemotronNanoConfig, kernels: str, device_type: str) -> Iterator[Fault]:
    """What keeps a model of this config from running on these kernels.

    Args:
        device_type: where it is to run; "auto" and "meta": not known yet.
    """
    if kernels not in ("torch", "cuda"):
        yield Fault("mamba_kernels", kernels, "must be 'torch' or 'cuda'")
    if kernels != "cuda" or "M" not in config.pattern:
        return
    if device_type not in ("auto", "meta", DEVICE_TYPE):
        rule = f"causal-conv1d and mamba-ssm run on CUDA devices only, and this is {device_type!r}; use 'torch'"
        yield Fault("mamba_kernels", kernels, rule)
    if config.conv_kernel not in _CONV_WIDTHS:
        rule = "causal-conv1d takes 2, 3 or 4 only; choose one of them, or mamba_kernels = 'torch'"
        yield Fault("conv_kernel", config.conv_kernel, rule)
    if rest := config.conv_channels % _CHANNELS_AT_ONCE:
        rule = (
            f"causal-conv1d takes a multiple of {_CHANNELS_AT_ONCE} channels, and mamba_num_heads * mamba_head_dim + "
            f"2 * mamba_num_groups * ssm_state_size = {config.conv_channels} (remainder {rest}); change one of them, "
            "or use 'torch'"
        )
        yield Fault("mamba_kernels", kernels, rule)
