"""A trained run, loaded again on one process: to generate from it, and to export it."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

import torch

from ckpt_layout import load_checkpoint, save_hf
from moe_core.config import load_config
from nemotron_nano.data.tokenizer import BYTES, JsonTokenizer, Tokenizer, load_tokenizer
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
    """The prompt, then the model's text as it comes, until the token that ends a document.

    Raises:
        PromptError: the prompt is empty.
    """
    if not prompt:
        raise PromptError('--prompt "": must have at least one character to continue')
    tokenizer = tokenizer_of(folder)
    yield prompt
    with trained_model(folder) as model:
        device = next(model.parameters()).device
        tokens = torch.tensor([list(tokenizer.encode([prompt])[0])], device=device)
        generator = torch.Generator(device).manual_seed(seed)
        stream = generate_stream(
            model, tokens, max_new_tokens, temperature=temperature, top_p=top_p, generator=generator
        )
        yield from tokenizer.pieces(takewhile(lambda number: number != tokenizer.end, map(int, stream)))


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer that went along with a run; bytes where none did."""
    file = folder / "tokenizer.json"
    return load_tokenizer(str(file) if file.is_file() else BYTES)


def export(folder: Path, output: Path, max_shard_size: str) -> None:
    """Write the latest checkpoint of a run as transformers reads it, and its tokenizer with it."""
    tokenizer = tokenizer_of(folder)
    with trained_model(folder) as model:
        config = model.config.to_hf()
        if config["eos_token_id"] is None:
            config["eos_token_id"] = tokenizer.end
        save_hf(model, output, family="nemotron_h", max_shard_size=max_shard_size, config=config)
    if not isinstance(tokenizer, JsonTokenizer):
        return
    shutil.copyfile(tokenizer.path, output / "tokenizer.json")
    beside = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_text},
        "generation_config.json": {"eos_token_id": config["eos_token_id"], "do_sample": True},
    }
    for name, content in beside.items():
        (output / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
