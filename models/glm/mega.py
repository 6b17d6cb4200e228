"""The mega-task path: a decode step as one launch of models/glm/decode.hip."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rocmega.cache import PAGE
from rocmega.errors import RequestError
from rocmega.models.common.mega import LAST_EPOCH as LAST_EPOCH
from rocmega.models.common.mega import POLL_LIMIT as POLL_LIMIT
from rocmega.models.common.mega import DecodePath, common_region_bytes
from rocmega.models.glm import kernel
from rocmega.models.glm.config import GlmConfig
from rocmega.models.glm.formulas import rope_angles
from rocmega.ring import TokenLaunch, TokenRing
from rocmega.sampling.choose import choose_rows
from rocmega.step import StepBatch, StepResult

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from rocmega.cache import PagedCache
    from rocmega.drivers.base import Driver, Function, Running
    from rocmega.models.glm.weights import GlmWeights, Layer
    from rocmega.parallel import Pipeline
    from rocmega.sampling.choose import Choice

MAX_TOKENS = 256  # of each row in a launch


def region_bytes(config: GlmConfig, tp: int, max_pages: int, blocks: int, *, exact: bool) -> dict[str, int]:
    """Sizes of everything a launch writes, by field of DecodeArgs; shapes as in descriptor.h.

    exact: activations are float32, one a word; else bf16, two.
    """
    shape, rows, pair, word = kernel.Shape.of(config, tp), kernel.ROWS, 8, 4
    splits = -(-config.index_topk // kernel.SPLIT)
    heads = shape.heads
    activations = {
        "x_normed": config.hidden_size,
        "q_normed": config.q_lora_rank,
        "query": heads * config.qk_head_dim,
        "index_query": config.index_n_heads * config.index_head_dim,
        "latent_query": heads * config.kv_lora_rank,
        "latent_out": heads * config.kv_lora_rank,
        "attention_out": heads * config.v_head_dim,
        "middle": max(shape.dense_width, (config.num_experts_per_tok + 1) * shape.expert_width),
    }
    values = {
        "x": config.hidden_size,
        "x_squares": config.hidden_size // kernel.TILE_ROWS,
        "q_squares": config.q_lora_rank // kernel.TILE_ROWS,
        "down_kv": config.latent_dim,
        "down_index": config.index_head_dim + config.index_n_heads,
        "router_scores": kernel.router_slices(config.hidden_size) * config.n_routed_experts,
    }
    slotted = values | {name: width if exact else width // 2 for name, width in activations.items()}
    return {
        **common_region_bytes(shape.vocab, blocks),
        **{name: 2 * rows * width * pair for name, width in slotted.items()},
        "index_scores": rows * max_pages * PAGE * word,
        "selection": rows * config.index_topk * word,
        "partial_out": rows * splits * shape.heads * config.kv_lora_rank * word,
        "partial_stat": rows * splits * shape.heads * 2 * word,
        "cache_flags": rows * pair,
        "score_flags": rows * max_pages * pair,
        "selection_flags": rows * pair,
        "partial_flags": rows * splits * pair,
        "tokens_out": MAX_TOKENS * rows * word,
    }


class MegaPath(DecodePath):
    """GLM's mega-task: also of several tokens a launch, and as one of several nodes.

    pipeline: the other nodes, where `weights` are of one node's layers: each makes a MegaPath and gives it the same
    steps.
    """

    kernel = kernel
    config: GlmConfig
    tokens_per_launch = MAX_TOKENS

    def __init__(
        self,
        config: GlmConfig,
        weights: GlmWeights,
        cache: PagedCache,
        driver: Driver,
        *,
        pipeline: Pipeline | None = None,
        **options: Any,
    ) -> None:
        self.pipeline = pipeline
        self._many: dict[bool, Function] = {}  # of several tokens; by whether of one row
        self._ring: TokenRing | None = None  # likewise
        self._running: Running | None = None  # the last launch of several tokens
        self._flight: TokenLaunch | None = None
        self._drawn: Sequence[Choice | None] | None = None  # choices that the ranks make when the kernel has ended
        super().__init__(config, weights, cache, driver, **options)

    def launch_many(
        self,
        batch: StepBatch,
        tokens: int,
        stops: Sequence[Collection[int]],
        choices: Sequence[Choice | None] | None = None,
    ) -> TokenLaunch:
        """Starts up to `tokens` steps in one launch, each on what the one before chose; gives them as they come.

        stops: of each row, at most 16 tokens; the launch ends with the first step in which a row chooses one of them.
        The rows are different requests, with pages for all the steps. choices: of the first step; of later ones the
        number is larger, and nothing else changes. The launch has to be read to its end before anything else runs.
        Of several ranks each starts the same launch and reads its own ring: they end with the same token, whichever
        is told to. They cannot draw: a draw needs all ranks' logits.
        Raises RequestError if that cannot be done in one launch.
        """
        self._check_many(batch, tokens, stops, choices)
        self.place(batch, logits=False, choices=choices)
        rows, steps = batch.rows, torch.arange(tokens, dtype=torch.int32)[:, None]
        self._positions[:tokens, :rows] = self._first_written[:tokens, :rows] = batch.positions + steps
        self._stops.fill_(-1)
        for row, ends in enumerate(stops):
            self._stops[row, : len(ends)] = torch.tensor(list(ends), dtype=torch.int32)
        self._count, self._streams = tokens, True
        ring = self._ring_for_many()
        self._args.ring, self._args.cancel = ring.address, ring.cancel_address
        ring.begin()
        self.enqueue()
        assert self._running is not None
        span = self._tags_of_token
        tag = self._args.epoch + span - 1  # of what is chosen: the last of its token
        self._flight = TokenLaunch(ring, self._running, rows, tokens, tag, span, stops, self._raise_if_given_up)
        return self._flight

    def _ring_for_many(self) -> TokenRing:
        """What launches of several tokens need is made with the first, on all ranks: a compiler takes longer than a
        kernel waits for another rank's.
        """
        if self._ring is None:

            def prepare() -> tuple[dict[bool, Function], TokenRing]:
                any_rows, one = self._variants(many=True)
                return {False: any_rows, True: one}, TokenRing(self.driver, MAX_TOKENS, kernel.ROWS)

            what = "prepare launches of several tokens"
            self._many, self._ring = self.group.agree(what, prepare) if self.group else prepare()
        return self._ring

    def _check_many(
        self,
        batch: StepBatch,
        tokens: int,
        stops: Sequence[Collection[int]],
        choices: Sequence[Choice | None] | None,
    ) -> None:
        if self.launches_per_step > 1 or self.pipeline is not None or not 1 <= tokens <= MAX_TOKENS:
            raise RequestError(
                f"{tokens} tokens in a launch: 1 to {MAX_TOKENS} can be done, in a launch that has all layers."
            )
        if self.weights.tp > 1 and any(choices or ()):
            raise RequestError("several tokens in a launch of several ranks: these draw when a step's launch is over.")
        if len(stops) != batch.rows or any(len(ends) > self._stops.shape[1] for ends in stops):
            raise RequestError(f"each row of a launch has at most {self._stops.shape[1]} tokens at which it stops.")
        last = replace(batch, positions=batch.positions + (tokens - 1))
        last.check(
            vocab=self.config.vocab_size,
            cache_pages=self.cache.pages,
            max_rows=self.max_rows,
            max_model_len=self.max_model_len,
        )

    def place(self, batch: StepBatch, *, logits: bool = True, choices: Sequence[Choice | None] | None = None) -> None:
        """Gives the next steps their input. Raises RequestError if the batch does not fit, or a launch still runs."""
        if self._flight is not None and not self._flight.over:
            raise RequestError("a launch of several tokens still runs: read it to its end first.")
        self._drawn = None
        super().place(batch, logits=logits, choices=choices)

    def _place_rows(self, batch: StepBatch) -> None:
        self._positions[0, : batch.rows] = batch.positions
        self._first_written[0, : batch.rows] = batch.first_written()
        self._count, self._streams = 1, False

    def _place_choices(self, drawn: Sequence[Choice | None]) -> None:
        # A draw needs the whole vocabulary. Of several ranks each has a part: they draw when the kernel has ended.
        if self.weights.tp > 1:
            self._chosen, self._drawn = False, drawn
        else:
            self._choices.place(drawn)

    def enqueue(self) -> None:
        """Launches the step that was placed, without waiting for it. Once more, it gives the same again.

        Of several nodes, each waits for the one before, and all but the last for their own launch: what a kernel that
        gave up has left must not be sent.
        """
        if self.pipeline is not None and self.pipeline.node > 0:
            self.pipeline.receive(self._border[: self._args.rows])
        for _ in self.launches():
            pass
        if self.pipeline is not None and self.pipeline.node + 1 < self.pipeline.nodes:
            self.driver.synchronize()
            self._raise_if_given_up()
            self.pipeline.send(self.residual())

    def launches(self) -> Iterator[int]:
        """The same on this node, one launch at a time: yields each one's last layer."""
        args = self._args
        args.tokens = self._count
        args.border = self._border_address if self.pipeline is not None and self.pipeline.node > 0 else 0
        for last in super().launches():
            args.border = 0  # only the first launch's input is another node's
            yield last

    def result(self) -> StepResult:
        """Waits for what was enqueued and gives it. Raises StepError if the kernel gave up waiting."""
        step = super().result()
        tokens, logits = step.tokens, step.logits
        if self._drawn is not None:  # the same bits and random numbers, so the same tokens
            everything = self._gather_logits(self._args.rows) if logits is None else logits
            tokens = torch.tensor(choose_rows(everything, self._drawn), dtype=torch.int32)
        if self.pipeline is not None:
            tokens = self.pipeline.from_last(tokens)
            logits = None if logits is None else self.pipeline.from_last(logits)
        return StepResult(tokens, logits)

    def residual(self) -> torch.Tensor:
        """The residual stream that the last step's layers here left, float32 [rows, hidden] on the device; a copy."""
        x = self._view("x", torch.float32).view(2, kernel.ROWS, self.config.hidden_size, 2)
        return x[0, : self._args.rows, :, 0].clone()  # x of an even number, 2 * layers; [1] is the tag

    @property
    def positions(self) -> torch.Tensor:
        """Of the rows that were placed, int32 [rows] on the device."""
        return self._positions[0, : self._args.rows]

    def close(self) -> None:
        """Frees what the launches write; the cache and the weights are the caller's. Ranks close together."""
        if self._flight is not None:
            self._flight.close()
        if self._ring is not None:
            self._ring.close()
        self._ring, self._flight = None, None
        super().close()

    def _launch(self) -> None:
        if not self._streams:
            return super()._launch()
        self._running = self.driver.start(self._many[self._args.rows == 1], *self._launch_shape())

    def _open_regions(self) -> None:
        if self._ring is not None:
            self._ring.clear()
        super()._open_regions()

    def _region_bytes(self) -> dict[str, int]:
        exact = self.weights.formats.cache == "f32"
        return region_bytes(self.config, self.weights.tp, self.max_pages, self.blocks, exact=exact)

    def _section(self) -> range:
        section: range = self.weights.section
        return section

    def _fill_model(self) -> None:
        args, device, rows = self._args, self.driver.device, kernel.ROWS
        self._border = torch.zeros(rows, self.config.hidden_size, device=device)
        self._positions = torch.zeros(MAX_TOKENS, rows, dtype=torch.int32, device=device)
        self._first_written = torch.zeros(MAX_TOKENS, rows, dtype=torch.int32, device=device)
        self._stops = torch.full((rows, self._header.constants["STOPS"]), -1, dtype=torch.int32, device=device)
        self._border_address = self._constant(self._border)
        args.positions = self._constant(self._positions)
        args.stops = self._constant(self._stops)
        args.first_written = self._constant(self._first_written)
        rope = rope_angles(torch.arange(self.max_model_len), self.config.rope_theta, self.config.qk_rope_head_dim)
        args.rope = self._constant(rope.to(device))

    def _fill_layer(self, entry: Any, number: int, layer: Layer) -> None:
        self._put_fields(entry, layer)
        if not layer:  # another node's: the norm that would meet what leaves this one, for nobody
            entry.attention_norm = self._constant(self.weights.final_norm)
        entry.dense = self.config.dense_layers[number]
        entry.full_index = self.config.full_index[number]
        entry.latent_cache = self.cache.latent_address(number)
        entry.index_cache = self.cache.index_address(number)
