"""A trained run, loaded again on one process: to generate from it, and to export it."""

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ckpt_layout import load_checkpoint, save_hf
from moe_core.config import load_config
from nemotron_nano.generate import generate_stream
from nemotron_nano.model import NemotronNano
from nemotron_nano.train.assemble import run_on_a_mesh, with_model
from nemotron_nano.train.rank import Place, choose_device_type, process_group

_ONE_PROCESS = ("transform=[]", "mesh.ep=1", "mesh.dp_shard=1", "mesh.dp_replicate=1")


class NotTrainedError(ValueError):
    """The run's folder does not hold what is asked of it."""


class PromptError(ValueError):
    """There is nothing to continue."""


@contextmanager
def trained_model(folder: Path) -> Iterator[NemotronNano]:
    """The model of the latest checkpoint in a run's folder, whole on this process, for the block.

    Raises:
        NotTrainedError: there is no checkpoint, or the run trained another kind of model.
    """
    config = load_config(folder / "config.toml", _ONE_PROCESS)
    if config["model"].name == "nemotron_nano":
        # whatever it was trained on, this machine may be another
        config = load_config(folder / "config.toml", (*_ONE_PROCESS, "model.mamba_kernels=torch"))
    device_type = choose_device_type(config.run.device_type)
    alone = Place(rank=0, local_rank=0, world_size=1, local_world_size=1)
    with process_group(alone, device_type, config.run.timeout_s):
        run = with_model(run_on_a_mesh(config, device_type=device_type))
        if not isinstance(run.model, NemotronNano):
            raise NotTrainedError(f"{folder}: the model is a {type(run.model).__name__}, not a NemotronNano")
        elsewhere = getattr(config["checkpointer"].config, "directory", None)
        checkpoints = Path(elsewhere) if elsewhere else folder / "checkpoints"
        if load_checkpoint(checkpoints, model=run.model) is None:
            raise NotTrainedError(f"{checkpoints} has no checkpoint; train with nemotron-nano train")
        yield run.model.eval()


def continue_text(
    folder: Path, prompt: str, max_new_tokens: int, *, temperature: float, top_p: float, seed: int
) -> Iterator[str]:
    """The prompt, then the model's bytes as text, as they come."""
    if not prompt:
        raise PromptError('--prompt "": must have at least one character to continue')
    yield prompt
    with trained_model(folder) as model:
        device = next(model.parameters()).device
        tokens = torch.tensor([list(prompt.encode())], device=device)
        generator = torch.Generator(device).manual_seed(seed)
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")  # holds back what begins a character
        for token in generate_stream(
            model, tokens, max_new_tokens, temperature=temperature, top_p=top_p, generator=generator
        ):
            yield utf8.decode(bytes([int(token)])) if token < 256 else ""


def export(folder: Path, output: Path, max_shard_size: str) -> None:
    """Write the latest checkpoint of a run as transformers reads it."""
    with trained_model(folder) as model:
        save_hf(model, output, family="nemotron_h", max_shard_size=max_shard_size, config=model.config.to_hf())
