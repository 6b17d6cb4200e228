"""Text to token ids and back, by the tokenizer that lies in the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rocmega.errors import RequestError

FILE = "tokenizer.json"


class Tokenizer:
    """The checkpoint's `tokenizer.json`. Raises RequestError where it, or the `tokenizers` package, is missing."""

    def __init__(self, directory: Path) -> None:
        path = directory / FILE
        if not path.is_file():
            raise RequestError(
                f"{directory} has no {FILE}, so text cannot be turned into tokens. Give token ids instead "
                "(--tokens on the command line), or put the model's tokenizer beside its weights."
            )
        try:
            import tokenizers
        except ImportError as error:
            raise RequestError(
                "Text needs the 'tokenizers' package: pip install 'rocmega[demo]', or give token ids instead "
                "(--tokens on the command line)."
            ) from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise RequestError(f"{path} is not a tokenizer that the 'tokenizers' package can read: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds by itself."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def find(directory: Path) -> Tokenizer | None:
    """The checkpoint's tokenizer, or None if it has none that can be read: output then comes as token ids only."""
    try:
        return Tokenizer(directory)
    except RequestError:
        return None
