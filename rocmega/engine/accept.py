"""What a step makes of a request: how its next token is to be chosen, the token's text and log probability, the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rocmega.engine.request import Request
from rocmega.errors import RequestError
from rocmega.outputs import Logprob
from rocmega.sampling.philox import seed_of_request

if TYPE_CHECKING:
    import torch

    from rocmega.runner import Runner
    from rocmega.sampling.choose import Choice
    from rocmega.tokenizer import Tokenizer


class Acceptor:
    """Gives requests their tokens. key: gives requests without a seed theirs."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer | None, key: int) -> None:
        self.runner, self.tokenizer, self.key = runner, tokenizer, key

    def prepare(self, request: Request, number: int) -> None:
        """Before a request's first step. Raises RequestError for stop texts that nobody can look for."""
        from rocmega.engine.text import AnswerText
        from rocmega.sampling.choose import Uses

        sampling = request.sampling
        if sampling.stop and self.tokenizer is None:
            raise RequestError("Stop texts need the checkpoint's tokenizer, and it has none: use stop_token_ids.")
        request.seed = seed_of_request(self.key, number) if sampling.seed is None else sampling.seed
        if sampling.penalized:
            request.uses = Uses(frozenset(request.prompt_token_ids), Counter(request.token_ids))
        if self.tokenizer is not None:
            request.text = AnswerText(self.tokenizer, sampling.stop, sampling.include_stop_str_in_output)

    @staticmethod
    def wants_logits(request: Request) -> bool:
        """Whether somebody wants to see the logits behind a request's tokens."""
        return request.sampling.logprobs is not None or request.observer is not None

    @staticmethod
    def choice(request: Request, drafts: Sequence[int] = ()) -> Choice | None:
        """How the token after the answer so far, and some guesses, is chosen; None for the largest logit."""
        from rocmega.sampling.choose import Choice, Uses

        sampling, uses = request.sampling, request.uses
        if sampling.plain:
            return None
        if uses is not None:  # a copy: what was used goes on while the choice stays
            uses = Uses(uses.prompt, uses.answer + Counter(drafts))
        return Choice(sampling, request.seed, len(request.token_ids) + len(drafts), uses)

    def stops(self, request: Request) -> frozenset[int]:
        """Tokens after which the request has ended."""
        sampling = request.sampling
        return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.runner.eos_token_ids)

    def accept(self, request: Request, token: int, logits: torch.Tensor | None) -> None:
        """The next token, and the model's logits behind it, f32 [vocab], if somebody wants to see them."""
        if logits is not None:
            if request.observer is not None:
                request.observer(len(request.token_ids), logits)
            if request.sampling.logprobs is not None:
                self._keep_logprobs(request, token, logits, request.sampling.logprobs)
        request.token_ids.append(token)
        if request.uses is not None:
            request.uses.answer[token] += 1
        if request.lookup is not None:
            request.lookup.extend([token])
        if request.text is not None:
            request.text.push(token)
        self._end(request, token)

    def _end(self, request: Request, token: int) -> None:
        sampling, text = request.sampling, request.text
        if text is not None and text.stopped_by is not None:
            request.finish_reason, request.stop_reason = "stop", text.stopped_by
        elif token in sampling.stop_token_ids:
            request.finish_reason, request.stop_reason = "stop", token
        elif token in self.runner.eos_token_ids and not sampling.ignore_eos:
            request.finish_reason = "stop"
        elif len(request.token_ids) == sampling.max_tokens:
            request.finish_reason = "length"
        if request.finished and text is not None:
            text.end()

    def _keep_logprobs(self, request: Request, token: int, logits: torch.Tensor, count: int) -> None:
        """The token's and the likeliest ones', by the model's own logits."""
        logprobs = logits.log_softmax(-1)
        best = logprobs.topk(min(count, len(logprobs)))
        entries = {
            at: self._logprob(at, value, rank)
            for rank, (value, at) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True), 1)
        }
        mine = float(logprobs[token])
        entries.setdefault(token, self._logprob(token, mine, int((logprobs > mine).sum()) + 1))
        request.logprobs.append(entries)
        request.cumulative_logprob += mine

    def _logprob(self, token: int, value: float, rank: int) -> Logprob:
        return Logprob(value, rank, None if self.tokenizer is None else self.tokenizer.decode([token]))
