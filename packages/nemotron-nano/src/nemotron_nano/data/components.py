"""The data components: config classes, which need no torch, and their factories."""

from typing import TYPE_CHECKING, Any

import attrs
from attrs import validators

from moe_core.plugins import Problem

if TYPE_CHECKING:
    from moe_core.config import Config
    from moe_core.plugins import Run
    from nemotron_nano.data.rows import Corpora, RowData
    from nemotron_nano.data.text import TextCorpus

_fraction = validators.and_(validators.gt(0.0), validators.lt(1.0))


@attrs.frozen(kw_only=True)
class RowsConfig:
    """What every component of this package asks for."""

    sequence_length: int = attrs.field(default=256, validator=validators.ge(1))
    """S: tokens of a row."""
    global_batch_size: int = attrs.field(default=16, validator=validators.ge(1))
    """Rows of an optimizer step over all ranks and microbatches."""
    microbatches: int = attrs.field(default=1, validator=validators.ge(1))
    """Forward and backward passes of a step; each takes its share of the rows."""
    validation_sequences: int = attrs.field(default=64, validator=validators.ge(1))
    """Rows that a validation takes, spread evenly over what is set apart."""
    isolate_documents: bool = False
    """Whether rows say where documents begin, so that nothing passes from one to the next."""


@attrs.frozen(kw_only=True)
class PythonStdlibConfig(RowsConfig):
    """`python_stdlib`: the source files of the running Python's standard library; one byte is one token."""


@attrs.frozen(kw_only=True)
class TextFilesConfig(RowsConfig):
    """`text_files`: the text files below a folder; one byte is one token."""

    folder: str
    """Searched with its sub-folders."""
    suffixes: tuple[str, ...] = (".txt", ".md", ".py")
    """Which files are text, by the end of their names."""
    validation_fraction: float = attrs.field(default=0.05, validator=_fraction)
    """Share of the files set apart for validation, by a hash of their relative paths."""


@attrs.frozen
class TokenFileConfig:
    """One of several files of token ids."""

    path: str
    """Megatron's .bin (with .idx beside it), Modalities' .pbin, or nanoGPT's .bin; its content tells which."""
    weight: float | None = attrs.field(default=None, validator=validators.optional(validators.gt(0.0)))
    """Its share of the rows, to any sum; left out for all: in proportion to their sizes."""


def _not_empty(_: object, attribute: "attrs.Attribute[Any]", value: tuple[Any, ...]) -> None:
    if not value:
        raise ValueError(f"{attribute.name} = {value!r}: must name at least one file")


@attrs.frozen(kw_only=True)
class TokensConfig(RowsConfig):
    """`tokens`: files of token ids, memory-mapped."""

    files: tuple[str | TokenFileConfig, ...] = attrs.field(validator=_not_empty)
    """Paths, or tables with `path` and `weight`."""
    validation_files: tuple[str, ...] = ()
    """Files that validation reads; none: the last documents of `files`."""
    validation_fraction: float = attrs.field(default=0.01, validator=_fraction)
    """Share of the documents of each file that is set apart where there are no files for it."""
    tokenizer: str | None = None
    """ "bytes", a tokenizer.json, or a folder with one; left out: the one beside the first file, if any. It goes along
    with the run, and says how many bytes of text a token is."""


def build_python_stdlib(config: PythonStdlibConfig, run: "Run") -> "RowData":
    from nemotron_nano.data.text import python_stdlib

    return _build(config, _of_bytes(python_stdlib()), run)


def build_text_files(config: TextFilesConfig, run: "Run") -> "RowData":
    from pathlib import Path

    from nemotron_nano.data.text import text_folder

    return _build(config, _of_bytes(text_folder(Path(config.folder), config.suffixes, config.validation_fraction)), run)


def _of_bytes(corpus: "TextCorpus") -> "Corpora":
    from nemotron_nano.data.rows import Corpora

    about = {
        "corpus": corpus.name,
        "digest": corpus.digest,
        "training_documents": len(corpus.training.starts),
        "training_tokens": len(corpus.training),
        "validation_documents": len(corpus.validation.starts),
        "validation_tokens": len(corpus.validation),
    }
    return Corpora(training=[corpus.training], validation=[corpus.validation], about=about, bytes_of=len)


def build_tokens(config: TokensConfig, run: "Run") -> "RowData":
    """All ranks call, and raise alike: one may see other files than the rest."""
    from nemotron_nano.data.streams import CorpusError
    from nemotron_nano.data.tokens import File, check_all_ids, open_corpora

    files = [File(file) if isinstance(file, str) else File(file.path, file.weight) for file in config.files]
    validation = [File(path) for path in config.validation_files]
    rows = getattr(getattr(run.model, "config", None), "vocab_size", None)
    vocabulary = rows if isinstance(rows, int) else None
    corpora, problem = None, None
    try:
        corpora, known = open_corpora(files, validation, config.validation_fraction, config.tokenizer)
        if vocabulary is not None:
            if known is not None and known > vocabulary:
                raise CorpusError(f"model.vocab_size = {vocabulary}: must be at least {known}, the tokenizer's")
            check_all_ids([*corpora.training, *corpora.validation], vocabulary, run.rank, run.world_size)
    except CorpusError as error:
        problem = str(error)
    if said := [told for told in _from_all_ranks(problem, run) if told is not None]:
        raise CorpusError(said[0])
    assert corpora is not None
    return _build(config, corpora, run, vocabulary)


def _from_all_ranks(value: str | None, run: "Run") -> list[str | None]:
    import torch.distributed as dist

    values: list[str | None] = [None] * run.world_size
    if run.world_size == 1:
        return [value]
    dist.all_gather_object(values, value)
    return values


def _build(config: RowsConfig, corpora: "Corpora", run: "Run", vocabulary: int | None = None) -> "RowData":
    import torch

    from nemotron_nano.data.rows import RowData

    dp = run.sub_mesh("dp")
    return RowData(
        corpora,
        sequence_length=config.sequence_length,
        global_batch_size=config.global_batch_size,
        microbatches=config.microbatches,
        validation_sequences=config.validation_sequences,
        isolate_documents=config.isolate_documents,
        seed=run.config.run.seed,
        dp_rank=dp.get_local_rank(),
        dp_size=dp.size(),
        device=torch.device(run.device_type),
        vocabulary=vocabulary,
    )


def validate_data(config: "Config", world_size: int) -> list[Problem]:
    """The rules between the table `[data]`, the number of ranks and the model's vocabulary."""
    data: Any = config["data"].config
    if not isinstance(data, RowsConfig):
        return []
    problems = []
    parts = world_size * data.microbatches
    if data.global_batch_size % parts:
        fix = f"for example {max(1, data.global_batch_size // parts) * parts}"
        rule = f"must be a multiple of {world_size} ranks x {data.microbatches} microbatches = {parts}"
        problems.append(Problem("data.global_batch_size", rule, data.global_batch_size, fix))
    vocabulary = getattr(config["model"].config, "vocab_size", None)
    if isinstance(vocabulary, int) and vocabulary < 256 and not isinstance(data, TokensConfig):
        problems.append(Problem("model.vocab_size", "must be at least 256: the data's tokens are bytes", vocabulary))
    return problems
