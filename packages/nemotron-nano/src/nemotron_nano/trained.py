"""A trained run, loaded again on one process: to generate from it, and to export it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ckpt_layout import load_checkpoint, save_hf
from ep_mesh import resolve_sub_mesh
from moe_core.config import load_config
from moe_core.plugins import Run
from nemotron_nano.components import NemotronNanoModelConfig
from nemotron_nano.generate import generate_stream
from nemotron_nano.model import NemotronNano
from nemotron_nano.train._process_group import Place, choose_device_type, process_group
from nemotron_nano.train.assemble import materialised_model

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
    if isinstance(config["model"].config, NemotronNanoModelConfig):
        # whatever it was trained on, this machine may be another
        config = load_config(folder / "config.toml", (*_ONE_PROCESS, "model.mamba_kernels=torch"))
    device_type = choose_device_type(config.run.device_type)
    alone = Place(rank=0, local_rank=0, world_size=1, local_world_size=1)
    with process_group(alone, device_type, config.run.timeout_s):
        run = Run(config, device_type=device_type, sub_mesh=resolve_sub_mesh)
        run = materialised_model(run.with_part("mesh", config["mesh"].build(run)))
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
        decoder = _Utf8()
        for token in generate_stream(
            model, tokens, max_new_tokens, temperature=temperature, top_p=top_p, generator=generator
        ):
            yield decoder.decode(int(token))


def export(folder: Path, output: Path, max_shard_size: str) -> None:
    """Write the latest checkpoint of a run as transformers reads it."""
    with trained_model(folder) as model:
        save_hf(model, output, family="nemotron_h", max_shard_size=max_shard_size, config=model.config.to_hf())


class _Utf8:
    """Bytes to text, holding back the first bytes of a character until its last."""

    def __init__(self) -> None:
        import codecs

        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def decode(self, byte: int) -> str:
        return self._decoder.decode(bytes([byte])) if byte < 256 else ""
