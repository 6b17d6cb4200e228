"""Requests on a mega-task and on the standard path, each with a cache of its own, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rocmega.drivers.host import HostDriver
from rocmega.models.deepseek.config import DeepseekConfig
from rocmega.models.deepseek.mega import MegaPath
from rocmega.models.deepseek.standard import StandardPath
from rocmega.models.deepseek.weights import DeepseekWeights
from rocmega.step import StepBatch

PAGES, REQUESTS, MAX_MODEL_LEN = 48, 16, 192
STALE = 1e4  # what caches hold where nothing of a request was written


class Side:
    """A path's cache and prefill."""

    def __init__(self, config: DeepseekConfig, weights: DeepseekWeights, activations: str):
        self.driver = HostDriver()
        self.cache = config.cache_spec(weights.formats.cache).open(PAGES, REQUESTS, self.driver)
        for pool in self.cache.pools.values():
            pool.fill_(STALE)
        self.standard = StandardPath(config, weights, self.cache, activations=activations)

    def prefill(self, request: int, tokens: torch.Tensor) -> torch.Tensor:
        self.cache.grow(request, len(tokens))
        return self.standard.prefill(tokens, 0, self.cache.block_table([request])[0])

    def batch(self, requests: Sequence[int], tokens: torch.Tensor, positions: torch.Tensor) -> StepBatch:
        for request, position in zip(requests, positions.tolist(), strict=True):
            self.cache.grow(request, position + 1)
        return StepBatch(tokens, positions, self.cache.block_table(requests))


class Pair:
    """The same requests on both paths: prompts by the standard path, then the tokens that the standard path chooses.

    Fields:
        tokens, positions: int32 [requests], what comes next of each.
        mega: `remake` makes another one, for other blocks, say.
    """

    def __init__(self, config: DeepseekConfig, weights: DeepseekWeights, activations: str = "auto", blocks: int = 3):
        self.config, self.weights, self.activations = config, weights, activations
        self.mine, self.theirs = (Side(config, weights, activations) for _ in range(2))
        self.tokens, self.positions = (torch.zeros(REQUESTS, dtype=torch.int32) for _ in range(2))
        self.mega = self._make(blocks=blocks)

    def _make(self, **options) -> MegaPath:
        return MegaPath(
            self.config,
            self.weights,
            self.mine.cache,
            self.mine.driver,
            max_model_len=MAX_MODEL_LEN,
            activations=self.activations,
            **options,
        )

    def remake(self, **options) -> None:
        self.mega.close()
        self.mega = self._make(**options)

    def begin(self, prompt: torch.Tensor, lengths: Sequence[int]) -> None:
        """Requests 0, 1, ... with the first so many tokens of the prompt."""
        for request, length in enumerate(lengths):
            for side in (self.mine, self.theirs):
                logits = side.prefill(request, prompt[:length])
            self.tokens[request], self.positions[request] = int(logits.argmax()), length

    def mega_step(self, requests: Sequence[int]) -> torch.Tensor:
        """Logits of one step by the mega-task, f32 [rows, vocab]."""
        rows = list(requests)
        result = self.mega.decode(self.mine.batch(rows, self.tokens[rows], self.positions[rows]))
        assert result.logits is not None
        assert torch.equal(result.tokens, result.logits.argmax(-1).to(torch.int32))
        return result.logits.clone()

    def step(self, requests: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of these requests: logits by the mega-task, and by the standard path."""
        rows = list(requests)
        mine = self.mega_step(rows)
        theirs = self.theirs.standard.decode(self.theirs.batch(rows, self.tokens[rows], self.positions[rows]))
        self.tokens[rows] = theirs.argmax(-1).to(torch.int32)
        self.positions[rows] += 1
        return mine, theirs

    def apart(self) -> float:
        """How far the two caches are, at most."""
        pools = zip(self.mine.cache.pools.values(), self.theirs.cache.pools.values(), strict=True)
        return max(float((mine.float() - theirs.float()).abs().max()) for mine, theirs in pools)

    def close(self) -> None:
        self.mega.close()
        self.mine.cache.close()
        self.theirs.cache.close()
