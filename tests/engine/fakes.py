"""A runner without a model: its next token depends on everything that the cache's pages hold of a request."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch

from rocmega.cache import PAGE, CacheSpec, PagedCache, TorchMemory
from rocmega.errors import RequestError
from rocmega.policy import Decision

VOCAB = 97
SPEC = CacheSpec(latent_dim=1, index_dim=1, full_index=(False,), dtype=torch.float32)


def next_token(tokens, variety=VOCAB) -> int:
    """What this "model" says after some tokens."""
    return hash(tuple(tokens)) % variety  # of integers: the same in every process


class Sequence:
    def __init__(self, runner, number):
        self.runner, self.number, self.length = runner, number, 0

    def close(self):
        self.runner.cache.release(self.number)
        self.length = 0


class FakeRunner:
    """As much of Runner as the engine uses. Keeps tokens where a model would keep latents, in plain lists."""

    eos_token_ids = frozenset()
    vocab_size = VOCAB
    context_limit = 1 << 20

    def __init__(self, max_rows=4, max_model_len=4 * PAGE, pages=12, variety=VOCAB):
        self.max_rows, self.max_model_len, self.variety = max_rows, max_model_len, variety
        self.cache = PagedCache(SPEC, pages, TorchMemory())
        self.memory = [[-1] * PAGE for _ in range(pages)]
        self.numbers = itertools.count()
        self.steps = 0
        self.prefilled = []
        self.flying = None

    def sequence(self):
        return Sequence(self, next(self.numbers))

    def prefill(self, sequence, tokens):
        assert self.flying is None or self.flying.over, "a prompt while a launch runs"
        self.prefilled.append(len(tokens))
        self.cache.grow(sequence.number, sequence.length + len(tokens))
        for token in tokens:
            self._write(sequence, token)

    def step(self, rows, path="auto", *, logits=False, choices=()):
        if not 1 <= len(rows) <= self.max_rows:
            raise RequestError(f"{len(rows)} rows")
        self.steps += 1
        tokens = []
        for sequence, token in rows:  # successive rows of a sequence see those before them
            self._write(sequence, token)
            tokens.append(next_token(self._read(sequence), self.variety))
        values = torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float() * 3 if logits else None
        return SimpleNamespace(decision=Decision("mega"), tokens=tokens, logits=values)

    def start(self, rows, count, stops, path="auto", choices=()):
        return FakeLaunch(self, rows, count, stops)

    def put(self, sequence, position, token):
        page = self.cache.pages_of(sequence.number)[position // PAGE]
        # Whoever writes into a page that another one holds would change his tokens.
        assert self.cache.allocator.holders(page) == 1, "a shared page is written"
        self.memory[page][position % PAGE] = token

    def read(self, sequence, length):
        pages = self.cache.pages_of(sequence.number)
        return list(itertools.chain.from_iterable(self.memory[page] for page in pages))[:length]

    def _write(self, sequence, token):
        self.put(sequence, sequence.length, token)
        sequence.length += 1

    def _read(self, sequence):
        return self.read(sequence, sequence.length)


class FakeLaunch:
    """As much of TokenLaunch as the engine uses. Its kernel is up to three tokens ahead of the reader."""

    def __init__(self, runner, rows, count, stops):
        assert runner.flying is None or runner.flying.over, "a launch while another one runs"
        runner.flying = self
        self.runner, self.count, self.stops = runner, count, stops
        self.rows = [(sequence, sequence.length) for sequence, _ in rows]
        self.inputs = [token for _, token in rows]
        self.made, self.cancelled, self.ended, self.over, self.looked = [], False, False, False, 0

    def next(self):
        self.looked += 1
        while not self.ended and len(self.made) < self.looked + self.looked % 4:
            self._step()
        tokens = self.made[self.looked - 1] if self.looked <= len(self.made) else None
        self.over = self.ended and self.looked >= len(self.made)
        return tokens

    def cancel(self):
        self.cancelled = True

    def _step(self):
        out = []
        for (sequence, begin), token in zip(self.rows, self.inputs, strict=True):
            position = begin + len(self.made)
            self.runner.put(sequence, position, token)
            out.append(next_token(self.runner.read(sequence, position + 1), self.runner.variety))
        self.made.append(out)
        self.inputs = out
        stopped = any(token in ends for token, ends in zip(out, self.stops, strict=True))
        self.ended = stopped or self.cancelled or len(self.made) == self.count


def solo(prompt, count, variety=VOCAB):
    """The answer of a request that runs alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, variety))
    return tokens[len(prompt) :]
