"""Mamba's convolution and scan by the kernels of causal-conv1d and mamba-ssm; imported only where they are chosen.

Each takes and returns what its counterpart in plain torch does, in fp32. The kernels would also take bf16, but then
round results, states and gradients to it. Triton runs products of fp32 in TF32 by default, so that results of the scan
agree with torch's to about 1e-3. What the kernels ask of their arguments was read in mamba-ssm 2.3.2 and causal-conv1d
1.7.0.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nemotron_nano import _mamba_kernels
from nemotron_nano._segments import number_runs
from nemotron_nano.model_config import Fault, NemotronNanoConfigError


def require_packages() -> None:
    """Import both packages.

    Raises:
        NemotronNanoConfigError: one is missing, or does not fit to this torch.
    """
    _scan_kernel(), _conv_kernel()


def scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int,
    segments: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `nemotron_nano.ssd.ssd_scan`, of at least one token."""
    _check(u)
    u, delta, A, B, C = (tensor.float() for tensor in (u, delta, A, B, C))
    y, state = _scan_kernel()(
        u,
        delta,
        A,
        B,
        C,
        chunk_size=chunk_size,
        initial_states=None if initial_state is None else initial_state.float(),
        seq_idx=_numbers(segments),
        return_final_states=True,
    )
    return y, state


def conv_silu(x: Tensor, weight: Tensor, bias: Tensor, *, before: Tensor | None, segments: Tensor | None) -> Tensor:
    """As `nemotron_nano.conv.causal_conv_silu`, of at least one token, not split yet: [b, S, channels]."""
    _check(x)
    out: Tensor = _conv_kernel()(
        _channels_last(x),
        weight.float(),
        bias.float(),
        seq_idx=_numbers(segments),
        initial_states=None if before is None else _channels_last(before),
        activation="silu",
    )
    return out.transpose(1, 2)


def _channels_last(x: Tensor) -> Tensor:
    """[b, S, channels] -> [b, channels, S] with channels side by side and no gaps: segments and states need it so."""
    return x.float().contiguous().transpose(1, 2)


def _numbers(segments: Tensor | None) -> Tensor | None:
    """An initial state is the past of number 0, and equal numbers are one segment wherever they stand."""
    return None if segments is None else number_runs(segments, torch.int32)


def _check(x: Tensor) -> None:
    if x.device.type != _mamba_kernels.DEVICE_TYPE:
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
