"""`kinds.Data` over streams: rows of equal length, shared out among the ranks.

What a row holds depends on the seed and on its number in the whole run, never on how many ranks there are:
the global batch of a step is the same under every layout.
"""

import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from moe_core.plugins import Batch, Run
from nemotron_nano.data.sampling import Mixture
from nemotron_nano.data.streams import CorpusError, Stream

_IGNORED = -100

Place = tuple[int, int]
"""(which stream, which row of it)."""


@attrs.frozen(kw_only=True)
class Corpora:
    """What there is to read, and what is known of it."""

    training: Sequence[Stream]
    validation: Sequence[Stream]
    weights: Sequence[float] | None = None
    """Shares of the training streams in the rows; None: by their sizes."""
    about: Mapping[str, Any] = attrs.field(factory=dict)
    """Of `describe`: name, digest, counts."""
    bytes_of: Callable[[np.ndarray[Any, Any]], int] | None = None
    """How many bytes of text these tokens are; None where no tokenizer is known."""
    tokenizer: Path | None = None
    """A `tokenizer.json` that goes along with the run."""


class RowData:
    """Batches as functions of the step.

    Args:
        vocabulary: ids must be below it; None: not known.

    Raises:
        CorpusError: a stream is shorter than one row.
    """

    def __init__(
        self,
        corpora: Corpora,
        *,
        sequence_length: int,
        global_batch_size: int,
        microbatches: int,
        validation_sequences: int,
        isolate_documents: bool,
        seed: int,
        dp_rank: int,
        dp_size: int,
        device: torch.device,
        vocabulary: int | None = None,
    ) -> None:
        options = (sequence_length, isolate_documents, device, vocabulary)
        self.corpora = corpora
        self._training = [_Rows(stream, *options) for stream in corpora.training]
        self._validation = [_Rows(stream, *options) for stream in corpora.validation]
        self._mixture = Mixture([len(rows) for rows in self._training], corpora.weights, seed)
        self._rows_per_microbatch = global_batch_size // (dp_size * microbatches)
        self._global_batch_size = global_batch_size
        self._validation_count = min(validation_sequences, sum(map(len, self._validation)))
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._description: Mapping[str, Any] | None = None

    def train_batches(self, step: int) -> Sequence[Batch]:
        mine = self._global_batch_size // self._dp_size
        first = step * self._global_batch_size + self._dp_rank * mine
        places = [self._mixture.row(number) for number in range(first, first + mine)]
        return self._batches(self._training, places)

    def validation_batches(self) -> Sequence[Batch]:
        places: list[Place | None] = list(self._validation_places())
        size = self._rows_per_microbatch
        share = math.ceil(math.ceil(len(places) / self._dp_size) / size) * size
        places += [None] * (share * self._dp_size - len(places))
        return self._batches(self._validation, places[self._dp_rank * share : (self._dp_rank + 1) * share])

    def describe(self) -> Mapping[str, Any]:
        if self._description is None:
            self._description = {**self.corpora.about, **self._bytes_per_token()}
        return self._description

    @property
    def files(self) -> Mapping[str, Path]:
        """What goes along with the run and its checkpoints."""
        return {} if self.corpora.tokenizer is None else {"tokenizer.json": self.corpora.tokenizer}

    def run_start(self, *, run: Run, **_: Any) -> None:
        for name, path in self.files.items() if run.rank == 0 else ():
            target = Path(run.config.run.output_dir) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists() or not target.samefile(path):
                shutil.copyfile(path, target)

    def _bytes_per_token(self) -> dict[str, float]:
        """Of what validation predicts; and bits per byte of the best model that ignores context."""
        if self.corpora.bytes_of is None:
            return {}
        counts: Counter[int] = Counter()
        count = 0
        for stream, row in self._validation_places():
            predicted = self._validation[stream].predicted(row)
            counts.update(predicted.tolist())
            count += self.corpora.bytes_of(predicted)
        tokens = sum(counts.values())
        bits = -sum(n * math.log2(n / tokens) for n in counts.values())
        return {"bytes_per_token": count / tokens, "byte_entropy_bits": bits / count}

    def _validation_places(self) -> list[Place]:
        """Spread evenly over the validation streams, one behind the other."""
        sizes = [len(rows) for rows in self._validation]
        places = []
        for i in range(self._validation_count):
            row, stream = i * sum(sizes) // self._validation_count, 0
            while row >= sizes[stream]:
                row, stream = row - sizes[stream], stream + 1
            places.append((stream, row))
        return places

    def _batches(self, streams: "Sequence[_Rows]", places: Sequence[Place | None]) -> list[Batch]:
        size = self._rows_per_microbatch
        return [_batch(streams, places[i : i + size]) for i in range(0, len(places), size)]


class _Rows:
    """A stream as rows of `length` tokens and the token after them."""

    def __init__(
        self, stream: Stream, length: int, isolate_documents: bool, device: torch.device, vocabulary: int | None
    ) -> None:
        self._count = (len(stream) - 1) // length
        if self._count < 1:
            raise CorpusError(
                f"{stream.name}: has {len(stream)} tokens, fewer than one row of data.sequence_length = {length} + 1"
            )
        if isolate_documents and not len(stream.starts):
            raise CorpusError(
                f"{stream.name}: does not say where documents begin, so that data.isolate_documents = true cannot keep "
                "them apart; make it false, or give a file of another format"
            )
        self.stream, self.device, self.isolates = stream, device, isolate_documents
        self._length, self._vocabulary = length, vocabulary

    def __len__(self) -> int:
        return self._count

    def predicted(self, number: int) -> np.ndarray[Any, Any]:
        start = number * self._length
        return self.stream.tokens[start + 1 : start + 1 + self._length]

    def window(self, number: int) -> Tensor:
        """[length + 1] int64."""
        start = number * self._length
        window = torch.from_numpy(self.stream.tokens[start : start + self._length + 1].astype(np.int64))
        if self._vocabulary is not None:
            check_ids(self.stream, start, window.numpy(), self._vocabulary)
        return window

    def document_ids(self, number: int) -> Tensor:
        """[length + 1] int64."""
        start = number * self._length
        return torch.tensor(self.stream.documents_of(start, start + self._length + 1))


def check_ids(stream: Stream, offset: int, ids: np.ndarray[Any, Any], vocabulary: int) -> None:
    """`ids` of `stream`, from `offset` on, must be ids of the model's.

    Raises:
        CorpusError: one is not; says which, and where.
    """
    wrong = (ids >= vocabulary) | (ids < 0)
    if wrong.any():
        first = int(wrong.argmax())
        raise CorpusError(
            f"{stream.where(offset + first)}: has the token id {int(ids[first])}, and the model's vocabulary is 0 to "
            f"{vocabulary - 1}: it was made with another tokenizer, or model.vocab_size is too small"
        )


def _batch(streams: Sequence[_Rows], places: Sequence[Place | None]) -> Batch:
    """These rows; None is a row whose labels are all ignored."""
    found = [(streams[stream], row) for stream, row in (place or (0, 0) for place in places)]
    device = streams[0].device
    text = torch.stack([rows.window(number) for rows, number in found])
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].clone()
    documents = None
    if streams[0].isolates:
        extended = torch.stack([rows.document_ids(number) for rows, number in found])
        labels[extended[:, 1:] != extended[:, :-1]] = _IGNORED
        documents = extended[:, :-1].contiguous().to(device)
    labels[[place is None for place in places]] = _IGNORED
    return Batch(tokens.to(device), labels.to(device), documents)
