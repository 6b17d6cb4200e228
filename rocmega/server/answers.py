"""Answers in the shape of OpenAI's endpoints, whole and in pieces."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from rocmega.outputs import CompletionOutput, Logprob, RequestOutput


def usage(outputs: list[RequestOutput]) -> dict[str, Any]:
    """Tokens of prompts and answers."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    answer = sum(len(output.outputs[0].token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclass
class Shape(ABC):
    """One endpoint's shape for one call. token_ids: whether choices list their tokens."""

    model: str
    token_ids: bool = False
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    prefix = ""
    object = ""
    chunk_object = ""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The answers of all prompts at once."""
        choices = [
            self._choice(index, self.content(output.outputs[0].text), output.outputs[0], 0)
            for index, output in enumerate(outputs)
        ]
        coverage = {
            "mega_coverage": [output.mega_coverage for output in outputs],
            "tokens_by_path": [output.tokens_by_path for output in outputs],
        }
        return self._envelope(self.object, choices) | {"usage": usage(outputs)} | coverage

    def piece(self, text: str, output: RequestOutput, sent: int) -> dict[str, Any]:
        """What is new since `sent` tokens: their text, and how it ends if it does."""
        return self._envelope(self.chunk_object, [self._choice(0, self.delta(text), output.outputs[0], sent)])

    def last(self, output: RequestOutput) -> dict[str, Any]:
        """The piece with the usage, after all others."""
        return self._envelope(self.chunk_object, []) | {"usage": usage([output])}

    def first(self) -> dict[str, Any] | None:
        """A piece before all others, if the endpoint has one."""
        return None

    @abstractmethod
    def content(self, text: str) -> dict[str, Any]:
        """Where a whole answer's text is."""

    @abstractmethod
    def delta(self, text: str) -> dict[str, Any]:
        """Where a piece's text is."""

    @abstractmethod
    def logprobs(self, tokens: list[int], entries: list[dict[int, Logprob]]) -> dict[str, Any]:
        """Tokens' log probabilities."""

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _choice(self, index: int, text: dict[str, Any], answer: CompletionOutput, sent: int) -> dict[str, Any]:
        tokens = answer.token_ids[sent:]
        logprobs = None if answer.logprobs is None else self.logprobs(tokens, answer.logprobs[sent:])
        choice = {"index": index, **text, "logprobs": logprobs, "finish_reason": answer.finish_reason}
        if answer.stop_reason is not None:
            choice["stop_reason"] = answer.stop_reason
        return choice | ({"token_ids": tokens} if self.token_ids else {})


class Completion(Shape):
    """POST /v1/completions."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    delta = content

    def logprobs(self, tokens: list[int], entries: list[dict[int, Logprob]]) -> dict[str, Any]:
        return {
            "tokens": [_text(token, entry) for token, entry in zip(tokens, entries, strict=True)],
            "token_logprobs": [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)],
            "top_logprobs": [{_text(at, entry): entry[at].logprob for at in entry} for entry in entries],
            "text_offset": [],
        }


class Chat(Shape):
    """POST /v1/chat/completions."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._envelope(self.chunk_object, [choice])

    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def logprobs(self, tokens: list[int], entries: list[dict[int, Logprob]]) -> dict[str, Any]:
        def one(token: int, entry: dict[int, Logprob]) -> dict[str, Any]:
            text = _text(token, entry)
            return {"token": text, "logprob": entry[token].logprob, "bytes": list(text.encode())}

        return {
            "content": [
                one(token, entry) | {"top_logprobs": [one(at, entry) for at in entry]}
                for token, entry in zip(tokens, entries, strict=True)
            ]
        }


def _text(token: int, entry: dict[int, Logprob]) -> str:
    decoded = entry[token].decoded_token
    return f"token_id:{token}" if decoded is None else decoded
