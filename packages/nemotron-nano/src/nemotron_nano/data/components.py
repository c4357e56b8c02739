"""The data components: config classes, which need no torch, and their factories."""

from typing import TYPE_CHECKING, Any

import attrs
from attrs import validators

from moe_core.plugins import Problem

if TYPE_CHECKING:
    from moe_core.config import Config
    from moe_core.plugins import Run
    from nemotron_nano.data.text import Corpus, TextData


@attrs.frozen(kw_only=True)
class TextConfig:
    """What every text component asks for."""

    sequence_length: int = attrs.field(default=256, validator=validators.ge(1))
    """S: tokens of a row; one byte is one token."""
    global_batch_size: int = attrs.field(default=16, validator=validators.ge(1))
    """Rows of an optimizer step over all ranks and microbatches."""
    microbatches: int = attrs.field(default=1, validator=validators.ge(1))
    """Forward and backward passes of a step; each takes its share of the rows."""
    validation_sequences: int = attrs.field(default=64, validator=validators.ge(1))
    """Rows that a validation takes, spread evenly over the validation text."""
    isolate_documents: bool = False
    """Whether rows say where files begin, so that nothing passes from one file to the next."""


@attrs.frozen(kw_only=True)
class PythonStdlibConfig(TextConfig):
    """`python_stdlib`: the source files of the running Python's standard library."""


@attrs.frozen(kw_only=True)
class TextFilesConfig(TextConfig):
    """`text_files`: the text files below a folder."""

    folder: str
    """Searched with its sub-folders."""
    suffixes: tuple[str, ...] = (".txt", ".md", ".py")
    """Which files are text, by the end of their names."""
    validation_fraction: float = attrs.field(
        default=0.05, validator=validators.and_(validators.gt(0.0), validators.lt(1.0))
    )
    """Share of the files set apart for validation, by a hash of their relative paths."""


def build_python_stdlib(config: PythonStdlibConfig, run: "Run") -> "TextData":
    from nemotron_nano.data.text import python_stdlib

    return _build(config, python_stdlib(), run)


def build_text_files(config: TextFilesConfig, run: "Run") -> "TextData":
    from pathlib import Path

    from nemotron_nano.data.text import text_folder

    return _build(config, text_folder(Path(config.folder), config.suffixes, config.validation_fraction), run)


def _build(config: TextConfig, corpus: "Corpus", run: "Run") -> "TextData":
    import torch

    from nemotron_nano.data.text import TextData

    dp = run.sub_mesh("dp")
    return TextData(
        corpus,
        sequence_length=config.sequence_length,
        global_batch_size=config.global_batch_size,
        microbatches=config.microbatches,
        validation_sequences=config.validation_sequences,
        isolate_documents=config.isolate_documents,
        seed=run.config.run.seed,
        dp_rank=dp.get_local_rank(),
        dp_size=dp.size(),
        device=torch.device(run.device_type),
    )


def validate_text(config: "Config", world_size: int) -> list[Problem]:
    """The rules between the table `[data]`, the number of ranks and the model's vocabulary."""
    data: Any = config["data"].config
    if not isinstance(data, TextConfig):
        return []
    problems = []
    parts = world_size * data.microbatches
    if data.global_batch_size % parts:
        fix = f"for example {max(1, data.global_batch_size // parts) * parts}"
        rule = f"must be a multiple of {world_size} ranks x {data.microbatches} microbatches = {parts}"
        problems.append(Problem("data.global_batch_size", rule, data.global_batch_size, fix))
    vocabulary = getattr(config["model"].config, "vocab_size", None)
    if isinstance(vocabulary, int) and vocabulary < 256:
        problems.append(Problem("model.vocab_size", "must be at least 256: the data's tokens are bytes", vocabulary))
    return problems
