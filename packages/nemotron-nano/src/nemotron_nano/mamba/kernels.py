"""Which kernels Mamba's convolution and scan run on, what that choice asks of a model, and the calls of CUDA's.

causal-conv1d and mamba-ssm are imported only where they are chosen. Their calls take and return what their counterparts
in plain torch do, in fp32. The kernels would also take bf16, but then round results, states and gradients to it. Triton
runs products of fp32 in TF32 by default, so that results of the scan agree with torch's to about 1e-3. What the kernels
ask of their arguments was read in mamba-ssm 2.3.2 and causal-conv1d 1.7.0. Choosing and checking need no torch.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from nemotron_nano.model_config import Fault, NemotronNanoConfig, NemotronNanoConfigError

if TYPE_CHECKING:
    from torch import Tensor

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


def require_packages() -> None:
    """Import both packages.

    Raises:
        NemotronNanoConfigError: one is missing, or does not fit to this torch.
    """
    _scan_kernel(), _conv_kernel()


def cuda_scan(
    u: "Tensor",
    delta: "Tensor",
    A: "Tensor",
    B: "Tensor",
    C: "Tensor",
    *,
    chunk_size: int,
    segments: "Tensor | None",
    initial_state: "Tensor | None",
) -> "tuple[Tensor, Tensor]":
    """As `ssd_scan`, of at least one token and with the segments of each row numbered from 0.

    The kernel takes an initial state for the past of number 0, and equal numbers for one segment wherever they stand.
    """
    _check(u)
    y, state = _scan_kernel()(
        *(tensor.float() for tensor in (u, delta, A, B, C)),
        chunk_size=chunk_size,
        initial_states=None if initial_state is None else initial_state.float(),
        seq_idx=None if segments is None else segments.int(),
        return_final_states=True,
    )
    return y, state


def cuda_conv_silu(
    x: "Tensor", weight: "Tensor", bias: "Tensor", *, before: "Tensor | None", segments: "Tensor | None"
) -> "Tensor":
    """As `causal_conv_silu`, of at least one token, with numbered segments, not split yet: [b, S, channels]."""
    _check(x)
    out: Tensor = _conv_kernel()(
        _channels_last(x),
        weight.float(),
        bias.float(),
        seq_idx=None if segments is None else segments.int(),
        initial_states=None if before is None else _channels_last(before),
        activation="silu",
    )
    return out.transpose(1, 2)


def _channels_last(x: "Tensor") -> "Tensor":
    """[b, S, channels] -> [b, channels, S] with channels side by side and no gaps: segments and states need it so."""
    return x.float().contiguous().transpose(1, 2)


def _check(x: "Tensor") -> None:
    import torch

    if x.device.type != DEVICE_TYPE:
        rule = f"its kernels run on CUDA devices only, and the tensors are on {x.device.type!r}; use 'torch'"
        raise NemotronNanoConfigError([Fault("mamba_kernels", "cuda", rule)])
    if x.dtype == torch.float64:
        rule = "its kernels take no float64; use 'torch', or another dtype"
        raise NemotronNanoConfigError([Fault("mamba_kernels", "cuda", rule)])


def _scan_kernel() -> Any:
    return _imported("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")


def _conv_kernel() -> Any:
    return _imported("causal_conv1d", "causal_conv1d_fn")


def _imported(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, OSError) as error:  # OSError: a library that was built for another torch
        package = module.partition(".")[0].replace("_", "-")
        rule = (
            f"needs {package}, which can't be used here ({error}): "
            "pip install --no-build-isolation 'nemotron-nano[cuda]', or use 'torch'"
        )
        raise NemotronNanoConfigError([Fault("mamba_kernels", "cuda", rule)]) from error
