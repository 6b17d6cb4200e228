"""A request, from the prompt to the last token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rocmega.errors import RequestError, RocmegaError
from rocmega.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from rocmega.sampling import SamplingParams

if TYPE_CHECKING:
    import torch

    from rocmega.engine.drafts import PromptLookup
    from rocmega.engine.text import AnswerText
    from rocmega.runner import CachedSequence, Runner
    from rocmega.sampling.choose import Uses


@dataclass(eq=False)
class Request:
    """What a caller wants, and what the engine has made of it so far.

    Fields a caller sets:
        prompt_token_ids, sampling; prompt: the text they came from. request_id: chosen by the engine if empty.
        observer: called with each token's number and the model's logits behind it (f32 [vocab], valid during the call).
        changed: called after each step that changed the request, in the thread that stepped.
    Fields the engine sets:
        token_ids: the answer. finish_reason, stop_reason: why it ended. error: what went wrong, if something did.
        by_path: how many of the answer's tokens each path produced. reused_tokens: of the prompt, those whose
        cache entries were there already. preemptions: how often its pages were taken from it. drafted, accepted: how
        many tokens were guessed, and how many of them right. drafted_steps: steps that had guesses of it.
    """

    prompt_token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    prompt: str | None = None
    request_id: str = ""
    observer: Callable[[int, torch.Tensor], None] | None = None
    changed: Callable[[Request], None] | None = None

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: RocmegaError | None = None
    by_path: Counter[str] = field(default_factory=Counter)
    reused_tokens: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_steps: int = 0

    # The engine's own.
    sequence: CachedSequence | None = None
    seed: int = 0
    uses: Uses | None = None
    text: AnswerText | None = None
    lookup: PromptLookup | None = None
    guesses: list[int] = field(default_factory=list)  # of what follows the last token, for the step that comes
    draft_state: tuple[int, torch.Tensor] | None = None  # the draft layer's last position, and its output there
    prefix: int = 0  # node of the prefix tree for what is cached of the prompt

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None or self.error is not None

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def longest(self) -> int:
        """Tokens of the prompt and of the longest answer."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    def token(self, position: int) -> int:
        """The token at a position of prompt and answer."""
        prompt = len(self.prompt_token_ids)
        return self.prompt_token_ids[position] if position < prompt else self.token_ids[position - prompt]

    @property
    def prefill_left(self) -> int:
        """Tokens of the prompt that prefill still has to cache: all but the last, which is decoded."""
        cached = 0 if self.sequence is None else self.sequence.length
        return max(0, len(self.prompt_token_ids) - 1 - cached)

    def output(self) -> RequestOutput:
        """The answer as it is now: a copy."""
        text = "" if self.text is None else self.text.text if self.finished else self.text.settled
        wanted = self.sampling.logprobs is not None
        completion = CompletionOutput(
            0,
            text,
            list(self.token_ids),
            self.finish_reason,
            self.stop_reason,
            self.cumulative_logprob if wanted else None,
            list(self.logprobs) if wanted else None,
        )
        coverage = self.by_path["mega"] / len(self.token_ids) if self.token_ids else None
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [completion],
            self.finished,
            self.reused_tokens,
            coverage,
            self.drafted,
            self.accepted,
            dict(self.by_path),
            1 + self.accepted / self.drafted_steps if self.drafted_steps else None,
        )


def check(tokens: Sequence[int], sampling: SamplingParams, runner: Runner, name: str = "The prompt") -> None:
    """Raises RequestError for a request that this model can never run; `name` says which prompt."""
    if not tokens:
        raise RequestError(f"{name} is empty: generation starts from at least one token.")
    vocab = runner.vocab_size
    bad = next((token for token in tokens if not 0 <= token < vocab), None)
    if bad is not None:
        raise RequestError(f"{name} holds token {bad}; this model's tokens are 0 to {vocab - 1}.")
    sampling.check_vocab(vocab)
    if len(tokens) + sampling.max_tokens > runner.max_model_len:
        raise RequestError(
            f"{name} has {len(tokens)} tokens and asks for {sampling.max_tokens} more, together over the longest "
            f"context of {runner.max_model_len} (max_model_len). Ask for fewer, shorten the prompt, or load the model "
            f"with a larger max_model_len (its checkpoint allows {runner.context_limit})."
        )
