"""Text to token ids and back: bytes, or any `tokenizer.json` of Hugging Face's `tokenizers`."""

import codecs
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from nemotron_nano.data.streams import CorpusError

BYTES = "bytes"
"""The name of the tokenizer whose ids are the bytes of UTF-8."""

_ENDS = (
    "<|endoftext|>", "<|end_of_text|>", "<|end_of_document|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>",
    "<|im_end|>",
)  # fmt: skip
"""What tokenizers call the token after a document, the likeliest first."""


class MissingTokenizersError(ImportError):
    """The extra that reads `tokenizer.json` is not installed."""


class Tokenizer(Protocol):
    """What this package asks of one."""

    @property
    def vocabulary(self) -> int:
        """Ids are below it."""
        ...

    @property
    def end(self) -> int | None:
        """The id that stands after each document; None: there is none."""
        ...

    @property
    def digest(self) -> str:
        """Tells it from others: 12 hex digits."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Ids of each, without any that the text does not ask for."""
        ...

    def decode(self, ids: Sequence[int]) -> bytes:
        """The text, in UTF-8; of an incomplete character, what there is of it."""
        ...

    def pieces(self, ids: Iterable[int]) -> Iterable[str]:
        """The text of ids as they come, each as soon as it is certain."""
        ...


class ByteTokenizer:
    """Ids 0 to 255; no id ends a document."""

    vocabulary = 256
    end: int | None = None
    digest = BYTES

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [text.encode() for text in texts]

    def decode(self, ids: Sequence[int]) -> bytes:
        return bytes(number for number in ids if number < 256)

    def pieces(self, ids: Iterable[int]) -> Iterable[str]:
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")  # holds back what begins a character
        for number in ids:
            yield utf8.decode(bytes([number])) if number < 256 else ""


class JsonTokenizer:
    """A `tokenizer.json`.

    Args:
        end: the text of the token after each document; None: `eos_token` of the `tokenizer_config.json` beside it, or
            the special token that is called as such tokens most often are.

    Raises:
        CorpusError: the file is no tokenizer, or has no such token.
        MissingTokenizersError: `tokenizers` is not installed.
    """

    def __init__(self, path: Path, end: str | None = None) -> None:
        try:
            from tokenizers import Tokenizer as Rust
        except ImportError as error:
            raise MissingTokenizersError("a tokenizer.json needs: pip install 'nemotron-nano[data]'") from error
        if not path.is_file():
            raise CorpusError(f"{path}: there is no such tokenizer")
        content = path.read_bytes()
        try:
            self._rust: Any = Rust.from_buffer(content)
        except Exception as error:  # the extension raises a bare Exception
            raise CorpusError(f"{path}: is no tokenizer.json: {error}") from error
        self.path = path
        self.digest = hashlib.sha256(content).hexdigest()[:12]
        self.vocabulary: int = 1 + max(self._rust.get_vocab().values())
        self.end: int | None = self._find(end)

    @property
    def end_text(self) -> str | None:
        return None if self.end is None else str(self._rust.id_to_token(self.end))

    def _find(self, name: str | None) -> int | None:
        if name is not None:
            number = self._rust.token_to_id(name)
            if number is None:
                raise CorpusError(f"{self.path}: has no token {name!r} to end documents with")
            return int(number)
        special = {token.content for token in self._rust.get_added_tokens_decoder().values() if token.special}
        for candidate in (_configured_end(self.path), *_ENDS):
            if candidate is not None and (candidate in special or candidate == _configured_end(self.path)):
                return self._find(candidate)
        return None

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [encoding.ids for encoding in self._rust.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> bytes:
        text: str = self._rust.decode(list(ids), skip_special_tokens=True)
        return text.encode()

    def pieces(self, ids: Iterable[int]) -> Iterable[str]:
        from tokenizers.decoders import DecodeStream

        stream: Any = DecodeStream(skip_special_tokens=True)
        for number in ids:
            yield stream.step(self._rust, number) or ""


def _configured_end(path: Path) -> str | None:
    config = path.with_name("tokenizer_config.json")
    if not config.is_file():
        return None
    token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def load_tokenizer(name: str, end: str | None = None) -> Tokenizer:
    """ "bytes", or the path of a `tokenizer.json` or of a folder with one.

    Raises:
        CorpusError: see `JsonTokenizer`; or `end` is asked of bytes, which have no such token.
    """
    if name == BYTES:
        if end is not None:
            raise CorpusError(f"the tokenizer {BYTES!r} has no token {end!r}: its ids are bytes")
        return ByteTokenizer()
    path = Path(name).expanduser()
    return JsonTokenizer(path / "tokenizer.json" if path.is_dir() else path, end)
