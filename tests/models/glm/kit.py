"""A mega-task and the standard path over one cache full of noise: what the tests of the mega-task share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from rocmega.cache import PAGE, PagedCache
from rocmega.drivers.host import HostDriver
from rocmega.models.glm.config import GlmConfig
from rocmega.models.glm.mega import MegaPath
from rocmega.models.glm.standard import StandardPath
from rocmega.models.glm.weights import GlmWeights
from rocmega.step import StepBatch
from rocmega.toolchain import Artifact

# Around index_topk = 24 of the tiny models and around page borders; the first three mix all kinds of rows.
POSITIONS = (150, 5, 64, 0, 22, 23, 24, 31, 32, 63, 65, 127, 128, 191, 129, 100)

MAX_MODEL_LEN = 192  # of a Server


class Server:
    """Requests that come and go: prompts by the standard path, tokens by the mega-task."""

    def __init__(self, config, weights, **options):
        driver = HostDriver()
        self.cache = PagedCache(config.cache_spec(weights.formats.cache), 8, driver)
        self.standard = StandardPath(config, weights, self.cache)
        self.mega = MegaPath(config, weights, self.cache, driver, max_model_len=MAX_MODEL_LEN, **options)
        self.length: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.logits: dict[str, list[torch.Tensor]] = {}

    def begin(self, request: str, prompt: torch.Tensor) -> None:
        self.cache.grow(request, len(prompt))
        logits = self.standard.prefill(prompt, 0, self.cache.block_table([request])[0])
        self.length[request], self.logits[request] = len(prompt), [logits]
        self.tokens[request] = [int(logits.argmax())]

    def step(self, *requests: str) -> None:
        for request in requests:
            self.cache.grow(request, self.length[request] + 1)
        tokens = torch.tensor([self.tokens[request][-1] for request in requests], dtype=torch.int32)
        positions = torch.tensor([self.length[request] for request in requests], dtype=torch.int32)
        result = self.mega.decode(StepBatch(tokens, positions, self.cache.block_table(requests)))
        assert result.logits is not None
        for request, token, logits in zip(requests, result.tokens.tolist(), result.logits.clone(), strict=True):
            self.length[request] += 1
            self.tokens[request].append(token)
            self.logits[request].append(logits)

    def close(self) -> None:
        self.mega.close()
        self.cache.close()


@dataclass(frozen=True)
class Outcome:
    """What a step left of each row: logits, token, and the new cache entries of all layers, as bytes."""

    logits: torch.Tensor
    tokens: torch.Tensor
    entries: torch.Tensor

    def row(self, row: int) -> Outcome:
        return Outcome(*(part[row : row + 1] for part in (self.logits, self.tokens, self.entries)))

    def same_bits(self, other: Outcome) -> bool:
        return all(
            torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
            for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)
        )


class Bench:
    """Rows at given positions, their contexts noise, and a mega-task to run them. Pages are scattered.

    Fields:
        driver: change its seed and check as you like.
        mega: the path under test, made when it is wanted; `remake` makes another one, for other blocks, say.
        standard: the same model on the same cache.
    """

    def __init__(
        self,
        config: GlmConfig,
        weights: GlmWeights,
        positions: Sequence[int] = POSITIONS,
        *,
        blocks: int = 3,
        max_model_len: int | None = None,
        mega_tasks: int = 1,
        artifact: Artifact | None = None,
        activations: str = "auto",
    ) -> None:
        self.activations = activations
        self.config, self.weights, self.positions = config, weights, list(positions)
        self.driver = HostDriver()
        counts = [position // PAGE + 1 for position in positions]
        random = torch.Generator().manual_seed(7)
        scattered = torch.randperm(sum(counts) + 2, generator=random).to(torch.int32)  # two pages are nobody's
        self.table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        for row, pages in enumerate(scattered[:-2].split(counts)):
            self.table[row, : len(pages)] = pages
        self.tokens = torch.randint(0, config.vocab_size, (len(counts),), generator=random).to(torch.int32)
        self.cache = PagedCache(config.cache_spec(weights.formats.cache), len(scattered), self.driver)
        self.noise = [torch.randn(pool.shape, generator=random).to(pool.dtype) for pool in self.pools]
        self.standard = StandardPath(config, weights, self.cache, activations=activations)
        self.max_model_len = max_model_len or max(positions) + 1
        self._options = blocks, mega_tasks, artifact
        self.reset()

    @cached_property
    def mega(self) -> MegaPath:
        return self._make(*self._options)

    def _make(
        self, blocks: int, mega_tasks: int = 1, artifact: Artifact | None = None, one_row: bool = False
    ) -> MegaPath:
        return MegaPath(
            self.config,
            self.weights,
            self.cache,
            self.driver,
            blocks=blocks,
            max_model_len=self.max_model_len,
            mega_tasks=mega_tasks,
            artifact=artifact,
            activations=self.activations,
            one_row=one_row,
        )

    def remake(self, blocks: int, mega_tasks: int = 1, artifact: Artifact | None = None, one_row: bool = False) -> None:
        """Another mega-task over the same cache."""
        self.mega.close()
        self.mega = self._make(blocks, mega_tasks, artifact, one_row)

    def close(self) -> None:
        if "mega" in vars(self):
            self.mega.close()
        self.cache.close()

    @property
    def pools(self) -> list[torch.Tensor]:
        """All pools [pages, PAGE, width], of latents and then of index keys."""
        return [pool for pool in (*self.cache.latent, *self.cache.index) if pool is not None]

    def reset(self) -> None:
        """Noise everywhere, the rows' own slots included."""
        for pool, noise in zip(self.pools, self.noise, strict=True):
            pool.copy_(noise)

    def batch(self, rows: Sequence[int] | None = None) -> StepBatch:
        rows = list(range(len(self.positions)) if rows is None else rows)
        positions = torch.tensor(self.positions, dtype=torch.int32)
        return StepBatch(self.tokens[rows], positions[rows], self.table[rows])

    def slots(self, rows: Sequence[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and place in it of the rows' own entries."""
        batch = self.batch(rows)
        positions = batch.positions.long()
        return batch.block_table.gather(1, positions[:, None] // PAGE)[:, 0].long(), positions % PAGE

    def entries(self, rows: Sequence[int] | None = None) -> torch.Tensor:
        """The rows' own cache entries of all layers, uint8 [rows, bytes]."""
        pages, places = self.slots(rows)
        return torch.cat([pool[pages, places].contiguous().view(torch.uint8) for pool in self.pools], dim=1)

    def cached(self, pool: torch.Tensor, row: int, positions: torch.Tensor) -> torch.Tensor:
        """A row's entries in a pool, [positions, width]."""
        return pool[self.table[row, positions // PAGE].long(), positions % PAGE]

    def step(self, rows: Sequence[int] | None = None) -> Outcome:
        """One step of the mega-task, from noise: these rows, or all."""
        self.reset()
        result = self.mega.decode(self.batch(rows))
        assert result.logits is not None
        return Outcome(result.logits.clone(), result.tokens.clone(), self.entries(rows))

    def standard_step(self, rows: Sequence[int] | None = None) -> Outcome:
        """The same by the standard path."""
        self.reset()
        logits = self.standard.decode(self.batch(rows))
        return Outcome(logits, logits.argmax(-1).to(torch.int32), self.entries(rows))
