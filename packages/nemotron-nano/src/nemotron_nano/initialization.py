"""Weights from a seed: every rank draws what it owns, and all layouts get the same global values.

A parameter's values come from generators that know the seed, the parameter's name and a block of its rows
(for a stack of experts: one expert), never the rank. They are drawn in fp32 on the CPU and cast.

Two schemes. "megatron", which the released model was trained from: N(0, initializer_range); matrices that write
to the residual stream smaller by sqrt(layers); A ~ U(1, 16), D = 1, softplus(dt_bias) log-uniform in
[time_step_min, time_step_max]. "hf": no matrix smaller but Mamba's out_proj (uniform), A = 1, 2, 3, ...
"""

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Generator, Tensor, nn

from ckpt_layout import LayoutError, local_blocks
from nemotron_nano.model_config import NemotronNanoConfig

Draw = Callable[[range, tuple[int, ...], Generator, NemotronNanoConfig], Tensor]
"""(rows of the whole parameter, shape of these rows, generator, config) -> their values, fp32."""

_BLOCK_NUMEL = 1 << 20
"""A parameter's rows are drawn in blocks of about as many values, so that a shard costs what it holds."""

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What activation checkpointing and compilation put into names."""


@torch.no_grad()
def init_weights(model: nn.Module, config: NemotronNanoConfig, seed: int) -> None:
    """Fill every parameter and buffer of `model`, whatever its device, dtype and sharding.

    Raises:
        ValueError: a parameter or buffer that the model is not known to have, or a placement other than
            replicated or sharded.
    """
    for name, parameter in model.named_parameters():
        name = _plain(name)
        draw = _draw_for(name, config)
        try:
            blocks = list(local_blocks(parameter))
        except LayoutError as error:
            raise ValueError(f"{name}: {error}") from error
        for local, where in blocks:
            _fill(local, where, parameter.shape, name, draw, config, seed)
    for name, buffer in model.named_buffers():
        if not _plain(name).endswith((".router.bias", ".tokens_per_expert")):
            raise ValueError(f"buffer {name}: its initial value is not known")
        buffer.zero_()


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _fill(
    local: Tensor,
    where: tuple[slice, ...],
    shape: torch.Size,
    name: str,
    draw: Draw,
    config: NemotronNanoConfig,
    seed: int,
) -> None:
    """Set `local`, which lies at `where` of the parameter `name` of `shape`."""
    (held, *others), generator = where, Generator()
    for index, rows in _blocks(name, shape):
        start, stop = max(rows.start, held.start), min(rows.stop, held.stop)
        if start < stop:
            # blocks of a parameter never share a seed: the CPU generator keeps 32 bits of it
            generator.manual_seed((_hash(f"{seed}/{name}") + index) % 2**32)
            values = draw(rows, (len(rows), *shape[1:]), generator, config)
            values = values[(slice(start - rows.start, stop - rows.start), *others)]
            local[start - held.start : stop - held.start].copy_(values)


def _blocks(name: str, shape: torch.Size) -> Iterator[tuple[int, range]]:
    """Rows of the whole parameter that share a generator; one row each in a stack of experts."""
    size = 1 if ".experts." in name else max(1, _BLOCK_NUMEL // max(1, shape[1:].numel()))
    for index, start in enumerate(range(0, shape[0], size)):
        yield index, range(start, min(start + size, shape[0]))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def _draw_for(name: str, config: NemotronNanoConfig) -> Draw:
    schemes = _HF if config.initializer == "hf" else _MEGATRON
    for suffix, draw in (*schemes.items(), *_BOTH.items()):
        if name.endswith(suffix):
            return draw
    raise ValueError(f"parameter {name}: its initial distribution is not known")


def _ones(rows: range, shape: tuple[int, ...], generator: Generator, config: NemotronNanoConfig) -> Tensor:
    return torch.ones(shape)


def _zeros(rows: range, shape: tuple[int, ...], generator: Generator, config: NemotronNanoConfig) -> Tensor:
    return torch.zeros(shape)


def _normal(rows: range, shape: tuple[int, ...], generator: Generator, config: NemotronNanoConfig) -> Tensor:
    return torch.randn(shape, generator=generator).mul_(config.initializer_range)


def _to_residual(rows: range, shape: tuple[int, ...], generator: Generator, config: NemotronNanoConfig) -> Tensor:
    return _normal(rows, shape, generator, config).div_(math.sqrt(config.num_layers))


def _uniform_by_fan_in(fan_in: int, shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.rand(shape, generator=generator).mul_(2).sub_(1).div_(math.sqrt(fan_in))


def _conv(rows: range, shape: tuple[int, ...], generator: Generator, config: NemotronNanoConfig) -> Tensor:
    """As `nn.Conv1d` draws its weight and bias: a depthwise kernel of 0.02 would silence u, B and C."""
    return _uniform_by_fan_in(config.conv_kernel, shape, generator)


def _hf_out_proj(rows: range, shape: tuple[int, ...], generator: Generator, config: NemotronNanoConfig) -> Tensor:
    return _uniform_by_fan_in(shape[1], shape, generator).div_(math.sqrt(config.num_layers))


def _A_log(rows: range, shape: tuple[int, ...], generator: Generator, config: NemotronNanoConfig) -> Tensor:
    return torch.rand(shape, generator=generator).mul_(15).add_(1).log_()


def _hf_A_log(rows: range, shape: tuple[int, ...], generator: Generator, config: NemotronNanoConfig) -> Tensor:
    return torch.arange(rows.start + 1, rows.stop + 1, dtype=torch.float32).log_()


def _dt_bias(rows: range, shape: tuple[int, ...], generator: Generator, config: NemotronNanoConfig) -> Tensor:
    low, high = math.log(config.time_step_min), math.log(config.time_step_max)
    dt = torch.rand(shape, generator=generator).mul_(high - low).add_(low).exp_().clamp_(min=config.time_step_floor)
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus


_MEGATRON: dict[str, Draw] = {
    ".conv1d.weight": _conv,
    ".conv1d.bias": _conv,
    ".A_log": _A_log,
    ".o_proj.weight": _to_residual,
    ".out_proj.weight": _to_residual,
    ".down_proj": _to_residual,
    ".down_proj.weight": _to_residual,
}

_HF: dict[str, Draw] = {
    ".conv1d.weight": _normal,
    ".conv1d.bias": _zeros,
    ".A_log": _hf_A_log,
    ".o_proj.weight": _normal,
    ".out_proj.weight": _hf_out_proj,
    ".down_proj": _normal,
    ".down_proj.weight": _normal,
}

_BOTH: dict[str, Draw] = {
    ".norm.weight": _ones,
    ".norm_f.weight": _ones,
    ".D": _ones,
    ".dt_bias": _dt_bias,
    "embeddings.weight": _normal,
    "lm_head.weight": _normal,
    ".in_proj.weight": _normal,
    ".q_proj.weight": _normal,
    ".k_proj.weight": _normal,
    ".v_proj.weight": _normal,
    ".router.weight": _normal,
    ".up_proj": _normal,
    ".up_proj.weight": _normal,
}
