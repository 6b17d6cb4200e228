"""What clients may ask, as OpenAI's completions and chat endpoints have it.

A field that is not listed here is refused, not ignored: an answer that silently lacks what was asked for is worse than
none. top_k, min_p, repetition_penalty, stop_token_ids, ignore_eos and return_token_ids are extensions, named as vLLM's.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rocmega.errors import RequestError
from rocmega.sampling import SamplingParams

TokenId = int


class StreamOptions(BaseModel):
    """What else a stream holds."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class Sampled(BaseModel):
    """What both endpoints have in common."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: Literal[1] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[TokenId, float] | None = None
    return_token_ids: bool = False
    user: str | None = None

    def sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Raises RequestError for values that are not possible."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=self.logit_bias or {},
            seed=self.seed,
            logprobs=logprobs,
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int = 16
    logprobs: int | None = None
    echo: Literal[False] = False
    best_of: Literal[1] = 1
    suffix: None = None


class TextPart(BaseModel):
    """A piece of a message."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation; the chat template may know more fields than these."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates want it."""
        fields = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            fields["content"] = "".join(part.text for part in self.content)
        return fields


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def logprobs_wanted(self) -> int | None:
        """How many likeliest tokens; None for no log probabilities at all."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true.")
        return (self.top_logprobs or 0) if self.logprobs else None

    def max_new_tokens(self, room: int) -> int:
        """Tokens asked for; without a number, as many as the context has room for."""
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return max(1, room) if asked is None else asked
