"""Ranks of a tiny model as threads of one process, beside one rank that has the whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from rocmega.cache import PagedCache
from rocmega.checkpoint import Checkpoint
from rocmega.models.glm.mega import MegaPath
from rocmega.models.glm.weights import pack
from rocmega.parallel.threads import ThreadRanks
from rocmega.sampling.choose import Choice
from rocmega.step import StepBatch
from tests.models.glm.kit import Bench, Outcome


@dataclass(frozen=True)
class RankOutcome:
    """What a step left on one rank: what it gave, and the residual stream of the last two versions, as bytes."""

    outcome: Outcome
    x: torch.Tensor


@dataclass(frozen=True)
class Launched:
    """What several steps gave on one rank: each one's tokens, and all of the cache after the last."""

    tokens: list[list[int]]
    pools: list[torch.Tensor]

    def same_bits(self, other: Launched) -> bool:
        pairs = zip(self.pools, other.pools, strict=True)
        return self.tokens == other.tokens and all(torch.equal(mine, theirs) for mine, theirs in pairs)


class RanksBench:
    """The rows of a bench, run by ranks that share its model; each has a cache of its own, with the bench's noise."""

    def __init__(
        self,
        whole: Bench,
        checkpoint: Checkpoint,
        tp: int,
        *,
        blocks: int = 2,
        mega_tasks: int = 1,
    ) -> None:
        self.whole, self.config = whole, whole.config
        self.ranks = ThreadRanks(tp)
        self.weights = [pack(checkpoint, self.config, tp=tp, rank=rank) for rank in range(tp)]
        formats = self.weights[0].formats
        self.caches = [
            PagedCache(self.config.cache_spec(formats.cache), whole.cache.pages, driver)
            for driver in self.ranks.drivers
        ]
        self.paths = self.ranks.run(lambda rank: self._path(rank, blocks, mega_tasks))

    def _path(self, rank: int, blocks: int, mega_tasks: int) -> MegaPath:
        return MegaPath(
            self.config,
            self.weights[rank],
            self.caches[rank],
            self.ranks.drivers[rank],
            blocks=blocks,
            max_model_len=self.whole.max_model_len,
            mega_tasks=mega_tasks,
            group=self.ranks.members[rank],
        )

    def reset(self, rank: int) -> list[torch.Tensor]:
        """Noise in all of a rank's pools; and the pools."""
        pools = [pool for pool in (*self.caches[rank].latent, *self.caches[rank].index) if pool is not None]
        for pool, noise in zip(pools, self.whole.noise, strict=True):
            pool.copy_(noise)
        return pools

    def launch(
        self, tokens: int, stops: Sequence[Collection[int]] = ((),) * 3, *, seed: int = 0, check: bool = False
    ) -> list[Launched]:
        """Up to so many steps of every rank in one launch, of which the last one is the bench's; from noise."""
        self.ranks.driver.seed, self.ranks.driver.check = seed, check

        def one(rank: int) -> Launched:
            pools = self.reset(rank)
            last = self.whole.batch()
            first = StepBatch(last.tokens, last.positions - (tokens - 1), last.block_table)
            chosen = list(self.paths[rank].launch_many(first, tokens, stops))
            return Launched(chosen, [pool.clone() for pool in pools])

        return self.ranks.run(one)

    def one_by_one(self, tokens: int) -> Launched:
        """The same in a launch each; rank 0's."""
        self.ranks.driver.check = False

        def one(rank: int) -> Launched:
            pools, last, chosen = self.reset(rank), self.whole.batch(), []
            now = last.tokens
            for step in range(tokens):
                positions = last.positions - (tokens - 1) + step
                now = self.paths[rank].decode(StepBatch(now, positions, last.block_table), logits=False).tokens
                chosen.append(now.tolist())
            return Launched(chosen, [pool.clone() for pool in pools])

        return self.ranks.run(one)[0]

    def close(self) -> None:
        self.ranks.run(lambda rank: self.paths[rank].close())
        for cache in self.caches:
            cache.close()

    def step(
        self,
        rows: Sequence[int] | None = None,
        *,
        seed: int = 0,
        check: bool = False,
        choices: Sequence[Choice | None] | None = None,
    ) -> list[RankOutcome]:
        """One step of every rank, from noise."""
        self.ranks.driver.seed, self.ranks.driver.check = seed, check

        def one(rank: int) -> RankOutcome:
            pools = self.reset(rank)
            result = self.paths[rank].decode(self.whole.batch(rows), choices=choices)
            assert result.logits is not None
            pages, places = self.whole.slots(rows)
            entries = [pool[pages, places].contiguous().view(torch.uint8) for pool in pools]
            outcome = Outcome(result.logits.clone(), result.tokens.clone(), torch.cat(entries, dim=1))
            return RankOutcome(outcome, self.paths[rank].region("x").clone())

        return self.ranks.run(one)
