"""Ranks of a tiny model as threads of one process, beside one rank that has the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rocmega.cache import PagedCache
from rocmega.checkpoint import Checkpoint
from rocmega.models.glm.mega import MegaPath
from rocmega.models.glm.weights import pack
from rocmega.parallel.threads import ThreadRanks
from rocmega.sampling.choose import Choice
from tests.models.glm.kit import Bench, Outcome


@dataclass(frozen=True)
class RankOutcome:
    """What a step left on one rank: what it gave, and the residual stream of the last two versions, as bytes."""

    outcome: Outcome
    x: torch.Tensor


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
            pools = [pool for pool in (*self.caches[rank].latent, *self.caches[rank].index) if pool is not None]
            for pool, noise in zip(pools, self.whole.noise, strict=True):
                pool.copy_(noise)
            result = self.paths[rank].decode(self.whole.batch(rows), choices=choices)
            assert result.logits is not None
            pages, places = self.whole.slots(rows)
            entries = [pool[pages, places].contiguous().view(torch.uint8) for pool in pools]
            outcome = Outcome(result.logits.clone(), result.tokens.clone(), torch.cat(entries, dim=1))
            return RankOutcome(outcome, self.paths[rank].region("x").clone())

        return self.ranks.run(one)
