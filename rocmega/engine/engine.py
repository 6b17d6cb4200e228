"""Requests that join and leave a running batch: who runs when, in which pages.

A step is one portion of prefill and then one decode step of every request whose prompt is cached, so neither waits long
for the other. Requests come in by their order. When the pages run out, the one that came last gives its pages back and
waits; when it comes in again its prompt is prefilled in the same chunks as before, and its answer so far is decoded
again, token by token. That is slower than prefilling it, but gives the same bits: a request's tokens do not depend on
what else ran. (Prefill and decode round differently; nothing else in the engine may change a token.)
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rocmega.cache import PAGE, pages_for
from rocmega.engine.accept import Acceptor
from rocmega.engine.drafts import Drafter, Lookup
from rocmega.engine.flight import Flight
from rocmega.engine.prefixes import ROOT, PrefixTree
from rocmega.engine.request import Request, check
from rocmega.engine.rows import Run, plan
from rocmega.errors import BusyError, RequestError, RocmegaError

if TYPE_CHECKING:
    from rocmega.runner import Runner
    from rocmega.tokenizer import Tokenizer

PREFILL_CHUNK = 256
MAX_WAITING = 4096
MAX_TOKENS_PER_LAUNCH = 256
DRAFT_METHODS = ("lookup", "mtp")
STOPS = 16  # tokens at which a row of a launch may stop


@dataclass(frozen=True)
class PageUse:
    """Pages of the cache: all of them, free ones, those that running requests hold, those kept for later requests.

    A page may be held and kept.
    """

    total: int
    free: int
    held: int
    kept: int


@dataclass
class Counts:
    """What has happened since the engine began; `steps` and `tokens` by path, `reasons` why a step fell back.

    `drafted`: tokens that were guessed; `accepted`: guesses that were right; `drafted_steps`: of single requests, with
    guesses; `launches`: of several steps each; `single`: why a step was single though more are allowed in a launch.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_steps: int = 0
    launches: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    single: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)


def busy(waiting: int) -> BusyError:
    """What callers are told when so many requests wait."""
    return BusyError(f"{waiting} requests wait already, which is as many as may (max_waiting): try later.")


class Engine:
    """Runs requests over a runner's paged cache, up to `runner.max_rows` at once. Threads may share it.

    path: "auto", or one by name, as for `rocmega.LLM`. prefill_chunk: how many tokens of a prompt one step
    caches, a multiple of the page's 64; also the grain in which prompts share their beginning. draft_tokens: how many
    tokens may be guessed ahead, for each request in each step, in rows to spare; 0: none. draft_method: "lookup", what
    followed the same tokens before, or "mtp", the model's own layer for it. tokens_per_launch: how many
    steps the mega-task may do in one launch, where nothing has to happen between them on the host; "auto": as many as
    it can. A request that joins or leaves ends a launch within a token. max_waiting: how
    many requests may wait for a row. tokenizer: gives answers their text, and is needed for stop texts. seed: of
    requests that have none; None draws one.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        path: str = "auto",
        prefill_chunk: int = PREFILL_CHUNK,
        draft_tokens: int = 0,
        draft_method: str = "lookup",
        tokens_per_launch: int | Literal["auto"] = 1,
        max_waiting: int = MAX_WAITING,
        tokenizer: Tokenizer | None = None,
        seed: int | None = None,
    ) -> None:
        if prefill_chunk < PAGE or prefill_chunk % PAGE:
            raise RequestError(f"prefill_chunk={prefill_chunk}: a multiple of {PAGE} is needed, the page's tokens.")
        if not 0 <= draft_tokens < runner.max_rows:
            raise RequestError(
                f"draft_tokens={draft_tokens}: a step of max_rows={runner.max_rows} has room for 0 to "
                f"{runner.max_rows - 1} guesses."
            )
        if draft_tokens and not runner.cache.undoes:
            raise RequestError(
                f"draft_tokens={draft_tokens}: this model keeps state of its last tokens, which wrong guesses would "
                "spoil. Leave it out, or 0."
            )
        if draft_method not in DRAFT_METHODS:
            raise RequestError(f"draft_method={draft_method!r}: choose one of {', '.join(DRAFT_METHODS)}.")
        most = MAX_TOKENS_PER_LAUNCH if tokens_per_launch == "auto" else tokens_per_launch
        if not isinstance(most, int) or not 1 <= most <= MAX_TOKENS_PER_LAUNCH:
            raise RequestError(
                f'tokens_per_launch={tokens_per_launch}: 1 to {MAX_TOKENS_PER_LAUNCH} can be done, or "auto".'
            )
        longest = pages_for(runner.max_model_len)
        if runner.cache.pages < longest:
            raise RequestError(
                f"The cache has {runner.cache.pages} pages of {PAGE} tokens, and one request of max_model_len="
                f"{runner.max_model_len} needs {longest}: give it more, or shorten max_model_len."
            )
        self.runner, self.path, self.prefill_chunk, self.max_waiting = runner, path, prefill_chunk, max_waiting
        self.draft_tokens, self.tokens_per_launch = draft_tokens, most
        self.counts = Counts()
        self._prefixes = PrefixTree(runner.cache.allocator, prefill_chunk)
        self._acceptor = Acceptor(runner, tokenizer, secrets.randbits(64) if seed is None else seed)
        self._drafter = self._drafts_from(draft_method) if draft_tokens else Drafter(runner)
        self._flight: Flight | None = None
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._numbers = itertools.count()
        self._lock = threading.RLock()

    def _drafts_from(self, method: str) -> Drafter:
        if method == "lookup":
            return Lookup(self.runner)
        if self.runner.pipeline is not None:
            raise RequestError(
                "draft_method='mtp' wants what all layers leave, which only the last node has: take 'lookup'."
            )
        from rocmega.engine.mtp import LayerDrafts

        return LayerDrafts(self.runner, self._acceptor, self._room_to_follow)

    # For callers.

    def add(self, request: Request) -> None:
        """Queues a request; a later `step` takes it in.

        Raises RequestError if it can never run, and BusyError, which is one, if too many wait.
        """
        with self._lock:
            if len(self._waiting) >= self.max_waiting:
                raise busy(len(self._waiting))
            self._prepare(request)
            self._waiting.append(request)
            if self._flight is not None and len(self._running) < self.runner.max_rows:
                self._flight.launch.cancel()  # it comes in when the token that is being chosen is there

    def prefill(self, request: Request) -> None:
        """Takes a request in and caches its prompt now; the next `step` decodes its first token.

        For callers that own the batching. Raises RequestError, with nothing changed, if it cannot run, or if no row or
        too few pages are free.
        """
        with self._lock:
            self._prepare(request)
            self._land()
            if len(self._running) == self.runner.max_rows or not self._open(request):
                raise RequestError(
                    f"{len(self._running)} of {self.runner.max_rows} rows run and {self.pages().free} pages are free: "
                    "that is no room for another request. Step until one has finished, or queue it with add()."
                )
            self._running.append(request)
            while request.prefill_left:
                self._prefill_chunk(request)

    def step(self) -> list[Request]:
        """One portion of prefill, one token of each running request. Returns the requests that got a token or ended.

        A launch of several tokens goes on from call to call, each of which gives the next token as soon as it is there.
        """
        with self._lock:
            if (flying := self._take()) is not None:
                self._tell(flying)
                return flying
            self._admit()
            self._prefill()
            rows = self._with_room([request for request in self._running if not request.prefill_left])
            changed = self._decode(rows) if rows else []
            self._tell(changed)
        return changed

    def abort(self, requests: Request | Iterable[Request]) -> None:
        """Ends requests; those that have ended already stay as they are. A launch that they are in ends first."""
        with self._lock:
            ending = [requests] if isinstance(requests, Request) else list(requests)
            if self._flight is not None and any(request in self._flight.requests for request in ending):
                self._land()  # nobody may have its pages before
            for request in ending:
                if not request.finished:
                    request.finish_reason = "abort"
                    self._remove(request)

    def fail(self, error: RocmegaError) -> list[Request]:
        """Ends everything with an error, after a step that could not be done. Returns the requests that this ended."""
        with self._lock:
            with contextlib.suppress(RocmegaError):  # what these end with is decided
                self._land()
            ended = [*self._running, *self._waiting]
            for request in ended:
                request.error = error
                self._remove(request)
            self._prefixes.clear()
        return ended

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._waiting)

    def pages(self) -> PageUse:
        """Who has the cache's pages."""
        with self._lock:
            cache = self.runner.cache
            held = {page for request in self._running for page in self._pages_of(request)}
            return PageUse(cache.pages, cache.allocator.available, len(held), self._prefixes.pages)

    def forget_prefixes(self) -> None:
        """Gives back the pages kept for later requests."""
        with self._lock:
            self._prefixes.clear()

    # Coming and going.

    def _prepare(self, request: Request) -> None:
        check(request.prompt_token_ids, request.sampling, self.runner)
        number = next(self._numbers)
        request.request_id = request.request_id or str(number)
        self._acceptor.prepare(request, number)
        self._drafter.begin(request)
        self.counts.prompt_tokens += len(request.prompt_token_ids)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.runner.max_rows and self._open(self._waiting[0]):
            self._running.append(self._waiting.popleft())

    def _open(self, request: Request) -> bool:
        """Gives a request pages for its tokens, some of which may be there; False, and nothing, if there are too few.

        A page is left for each running request that will need more, lest it come in only to be thrown out.
        """
        cache = self.runner.cache
        node, shared = ROOT, list[int]()
        if cache.shares_prefixes:
            node, shared = self._prefixes.match(request.prompt_token_ids[:-1])
        sequence = self.runner.sequence()
        cache.adopt(sequence.number, shared)  # before there is room made by evicting them
        growing = sum(len(self._pages_of(other)) < pages_for(other.longest) for other in self._running)
        if not self._make_room(pages_for(request.length) - len(shared) + growing):
            sequence.close()
            return False
        cache.grow(sequence.number, request.length)
        sequence.length = len(shared) * PAGE
        request.sequence, request.prefix = sequence, node
        if not request.preemptions:
            request.reused_tokens = sequence.length
            self.counts.reused_tokens += sequence.length
        return True

    def _make_room(self, pages: int) -> bool:
        """Whether so many pages are free, if need be after letting go of kept prefixes."""
        allocator = self.runner.cache.allocator
        while allocator.available < pages and self._prefixes.evict():
            pass
        return allocator.available >= pages

    def _preempt(self, request: Request) -> None:
        self._remove(request)
        self._waiting.appendleft(request)
        request.preemptions += 1
        self.counts.preemptions += 1

    def _remove(self, request: Request) -> None:
        if request.sequence is not None:
            request.sequence.close()
            request.sequence = None
        if request in self._running:
            self._running.remove(request)
        if request in self._waiting:
            self._waiting.remove(request)
        if request.finished:
            self.counts.finished["error" if request.error else str(request.finish_reason)] += 1

    def _pages_of(self, request: Request) -> list[int]:
        return [] if request.sequence is None else self.runner.cache.pages_of(request.sequence.number)

    # Running.

    def _prefill(self) -> None:
        """Up to prefill_chunk tokens, in the order of requests; chunks are not cut to fit."""
        left = self.prefill_chunk
        for request in self._running:
            while request.prefill_left and left > 0:
                left -= self._prefill_chunk(request)

    def _prefill_chunk(self, request: Request) -> int:
        """The next chunk of a prompt. Chunks lie at multiples of their size: those of equal prompts are the same."""
        start = time.perf_counter()
        sequence = request.sequence
        assert sequence is not None
        begin = sequence.length
        count = min(self.prefill_chunk, request.prefill_left)
        tokens = request.prompt_token_ids[begin : begin + count]
        self._drafter.prefill(request, tokens)
        if count == self.prefill_chunk and self.runner.cache.shares_prefixes:
            pages = self._pages_of(request)[begin // PAGE : (begin + count) // PAGE]
            request.prefix = self._prefixes.insert(request.prefix, tokens, pages)
        self.counts.prefill_seconds += time.perf_counter() - start
        return count

    def _with_room(self, rows: list[Request]) -> list[Request]:
        """The rows that have a page for their next token, which may cost those that came last theirs."""
        for request in rows:
            while request.sequence is not None and not self._grow(request):
                self._preempt(self._running[-1])
        return [request for request in rows if request.sequence is not None]

    def _grow(self, request: Request) -> bool:
        assert request.sequence is not None
        missing = pages_for(request.sequence.length + 1) - len(self._pages_of(request))
        if not self._make_room(max(0, missing)):
            return False
        self.runner.cache.grow(request.sequence.number, request.sequence.length + 1)
        return True

    def _decode(self, requests: list[Request]) -> list[Request]:
        if self.tokens_per_launch > 1 and (done := self._launch(requests)) is not None:
            return done
        start = time.perf_counter()
        self._guess(requests)
        runs = plan(requests, self.runner.max_rows, self._room_to_follow)
        begins = [run.sequence.length for run in runs]
        inputs = [(run.sequence, token) for run in runs for token in run.tokens]
        choices = [choice for run in runs for choice in run.choices(self._acceptor)]
        wanted = any(map(self._acceptor.wants_logits, requests))
        left = {"residual": True} if self._drafter.wants_residual else {}
        result = self.runner.step(inputs, self.path, logits=wanted, choices=choices, **left)
        path = result.decision.path
        self.counts.steps[path] += 1
        self.counts.reasons.update(result.decision.reasons)
        changed, row = [], 0
        for run, begin in zip(runs, begins, strict=True):
            rows = slice(row, row := row + len(run.tokens))
            logits = None if result.logits is None or not wanted else result.logits[rows]
            new = run.settle(self._acceptor, begin, result.tokens[rows], logits)
            if new:
                self._count(run, path, new)
                changed.append(run.request)
        self._drafter.took(runs, begins, result.residual if left else None)
        self.counts.decode_seconds += time.perf_counter() - start
        return changed

    def _guess(self, requests: list[Request]) -> None:
        """Of requests that have decoded all of their answer."""
        spare = self.runner.max_rows - len(requests)
        wanted = []
        for request in requests:
            request.guesses = []
            ended = request.sequence is not None and request.sequence.length + 1 == request.length
            most = min(self.draft_tokens, spare, request.longest - request.length - 1)
            if ended and most > 0:
                wanted.append((request, most))
        if wanted:
            self._drafter.guess(wanted, -(-spare // len(requests)))

    def _launch(self, requests: list[Request]) -> list[Request] | None:
        """Starts a launch of several tokens of every request and takes the first; None if that is not to be."""
        stops = [self._acceptor.stops(request) for request in requests]
        if (reason := self._why_single(requests, stops)) is not None:
            self.counts.single[reason] += 1
            return None
        count = self._tokens_at_once(requests)
        if count == 1:
            return None
        inputs = [(r.sequence, r.token(r.sequence.length)) for r in requests if r.sequence is not None]
        choices = [self._acceptor.choice(request) for request in requests]
        launch = self.runner.start(inputs, count, stops, self.path, choices)
        if isinstance(launch, str):
            self.counts.single[launch] += 1
            return None
        self.counts.launches += 1
        self._flight = Flight(launch, requests)
        return self._take()

    def _take(self) -> list[Request] | None:
        """The next token of the launch that runs, when it comes; None, and the launch is over, if none does.

        Where a request ends though the launch goes on (a stop text, of which the kernel does not know), the launch is
        ended too: the pages of those that have ended are given back when nobody writes them any more.
        """
        flight = self._flight
        if flight is None:
            return None
        start = time.perf_counter()
        try:
            taken = flight.take(self._acceptor)
            if any(request.finished for request in flight.requests):
                taken += flight.land(self._acceptor)
        except BaseException:
            self._flight = None
            raise
        self.counts.steps["mega"] += len(taken)
        self.counts.tokens["mega"] += sum(taken)
        if flight.launch.over:
            self._flight = None
        for request in flight.requests:
            if request.finished:
                self._remove(request)
        self.counts.decode_seconds += time.perf_counter() - start
        return flight.requests if taken else None

    def _land(self) -> None:
        """Ends the launch that runs, if one does, and takes the tokens that were still to come."""
        if self._flight is not None:
            self._flight.launch.cancel()
        while (changed := self._take()) is not None:
            self._tell(changed)

    @staticmethod
    def _tell(changed: list[Request]) -> None:
        for request in changed:
            if request.changed is not None:
                request.changed(request)

    def _why_single(self, requests: list[Request], stops: list[frozenset[int]]) -> str | None:
        """What has to happen between the next steps on the host; None if nothing does."""
        if self.draft_tokens:
            return "tokens are guessed ahead"
        if any(request.prefill_left for request in self._running):
            return "a prompt is being cached"
        if any(map(self._needs_the_host, requests)):
            return "a request has penalties, wants log probabilities or is behind after a preemption"
        return f"a request has more than {STOPS} stop tokens" if max(map(len, stops)) > STOPS else None

    def _tokens_at_once(self, requests: list[Request]) -> int:
        """As many as every request wants and has pages for."""
        count = min(self.tokens_per_launch, *(request.longest - request.length for request in requests))
        for request in requests:
            count = min(count, 1 + self._room_to_follow(request, count - 1))
        return count

    def _needs_the_host(self, request: Request) -> bool:
        """Whether something happens between a request's tokens that the kernel cannot do."""
        behind = request.sequence is not None and request.sequence.length + 1 < request.length
        return behind or request.sampling.penalized or self._acceptor.wants_logits(request)

    def _room_to_follow(self, request: Request, count: int) -> int:
        """Pages for tokens that may turn out wrong: only such that are free."""
        sequence, cache = request.sequence, self.runner.cache
        assert sequence is not None
        held = len(self._pages_of(request)) + cache.allocator.available
        count = min(count, held * PAGE - sequence.length - 1)
        cache.grow(sequence.number, sequence.length + 1 + count)
        return count

    def _count(self, run: Run, path: str, new: int) -> None:
        request = run.request
        request.by_path[path] += new
        request.drafted += len(run.drafts)
        request.accepted += new - 1
        request.drafted_steps += bool(run.drafts)
        self.counts.tokens[path] += new
        self.counts.drafted += len(run.drafts)
        self.counts.accepted += new - 1
        self.counts.drafted_steps += bool(run.drafts)
        if request.finished:
            self._remove(request)
