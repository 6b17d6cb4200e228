"""What a request gives, in vLLM's shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Logprob:
    """A token's log probability by the model's own logits, its rank among all tokens (from 1), and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One answer.

    Fields:
        text: empty if the checkpoint has no tokenizer.
        cumulative_logprob, logprobs: per token, token id -> Logprob; None unless SamplingParams.logprobs asked for it.
        finish_reason: "stop", "length" or "abort"; None while more may come.
        stop_reason: the stop text or stop token id that ended it; None at an end-of-sequence token.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass
class RequestOutput:
    """A prompt with its answer as it is so far.

    Fields:
        prompt: None if it was given as token ids.
        num_cached_tokens: tokens of the prompt that another request's cache pages served.
        mega_coverage: the share of the answer's tokens that the mega-task produced; None before the first.
        num_draft_tokens, num_accepted_tokens: tokens that were guessed ahead, and how many of them were right.
        accepted_length: tokens that a step with guesses gave, on average: 1 if none was right; None if there was none.
        tokens_by_path: how many of the answer's tokens came by the mega-task, the fused path and the standard path.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    num_cached_tokens: int = 0
    mega_coverage: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    tokens_by_path: dict[str, int] = field(default_factory=dict)
    accepted_length: float | None = None
