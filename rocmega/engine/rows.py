"""Which rows a decode step has: every request's next token, and in rows to spare, tokens that should follow it.

What should follow are tokens that a preempted request has had already, or guesses. A guess is right if the model, run
on what is before it, chooses it; everything after the first wrong one is forgotten. A choice depends on nothing but the
tokens before it, the seed and its number, so the answer is the same, token by token, as without guesses: for greedy
requests, and for drawn ones too. (This is the rejection rule for guesses that are certain: a draw from the model's
distribution is the guess with the probability that the rule would accept it with, and else a draw from the rest.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocmega.engine.request import Request

if TYPE_CHECKING:
    from rocmega.engine.accept import Acceptor
    from rocmega.runner import CachedSequence
    from rocmega.sampling.choose import Choice


@dataclass
class Run:
    """A request's rows: `tokens` are their inputs, of which the first `known` are the request's own."""

    request: Request
    sequence: CachedSequence
    tokens: list[int]
    known: int

    @property
    def drafts(self) -> list[int]:
        """Guesses among the inputs."""
        return self.tokens[self.known :]

    def choices(self, acceptor: Acceptor) -> Iterator[Choice | None]:
        """How each row's token is chosen; where it is known, it does not matter."""
        new = self.sequence.length + self.known == self.request.length
        for row in range(len(self.tokens)):
            after = row + 1 - self.known
            yield acceptor.choice(self.request, self.drafts[:after]) if new and after >= 0 else None

    def settle(self, acceptor: Acceptor, begin: int, chosen: Sequence[int], logits: Any) -> int:
        """Takes what the step chose, up to the first wrong guess; returns the number of new tokens.

        begin: what the sequence had cached before the step. chosen, logits: of these rows; logits may be None.
        """
        if begin + self.known < self.request.length:
            return 0  # still repeating what it had
        for row in range(self.known - 1, len(self.tokens)):
            acceptor.accept(self.request, chosen[row], None if logits is None else logits[row])
            right = row + 1 < len(self.tokens) and self.tokens[row + 1] == chosen[row]
            if self.request.finished or not right:
                break
        self.sequence.length = begin + row + 1  # entries after it are of wrong guesses, and written anew
        return row + 2 - self.known


def plan(requests: Sequence[Request], rows: int, room: Callable[[Request, int], int]) -> list[Run]:
    """The rows of a step, at most `rows`; spare ones in equal parts, the first requests first. Guesses are used up.

    room(request, count): gives the request pages for up to `count` tokens more, and says for how many.
    """
    runs = []
    spare = rows - len(requests)
    for at, request in enumerate(requests):
        sequence = request.sequence
        assert sequence is not None
        share = -(-spare // (len(requests) - at))
        begin = sequence.length
        known = [request.token(position) for position in range(begin, min(request.length, begin + 1 + share))]
        following, request.guesses = request.guesses[:share], []
        extra = room(request, len(known) + len(following) - 1)
        tokens = [*known, *following][: 1 + extra]
        spare -= len(tokens) - 1
        runs.append(Run(request, sequence, tokens, min(len(known), len(tokens))))
    return runs
