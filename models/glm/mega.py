"""The mega-task path: a decode step as one launch of models/glm/decode.hip."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rocmega import descriptor
from rocmega.cache import PAGE
from rocmega.checkpoint.tiles import PackedMatrix
from rocmega.errors import RequestError, StepError
from rocmega.models.glm import kernel
from rocmega.models.glm.activations import choose
from rocmega.models.glm.config import GlmConfig
from rocmega.models.glm.formulas import rope_angles
from rocmega.models.glm.shard import split_layers, symmetric_bytes
from rocmega.ring import TokenLaunch, TokenRing
from rocmega.sampling.choose import choose_rows
from rocmega.sampling.device import ChoiceTable
from rocmega.step import StepBatch, StepResult
from rocmega.timeline import CAPACITY, Timeline
from rocmega.timeline import read as read_timeline
from rocmega.toolchain import compile as compile_unit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from rocmega.cache import PagedCache
    from rocmega.drivers.base import Driver, Function, Running, SharedBuffer
    from rocmega.models.glm.weights import GlmWeights, Layer
    from rocmega.parallel import Group, Pipeline, SymmetricBuffer
    from rocmega.sampling.choose import Choice
    from rocmega.toolchain import Artifact

POLL_LIMIT = 20_000_000  # polls before a wait gives up: some 10 s of a poll each half microsecond
LAST_EPOCH = 1 << 31  # flags are compared as signed differences; regions begin anew before tags get that large
MAX_TOKENS = 256  # of each row in a launch
ERROR_WORDS = 8  # of each block, after those of the launch: claimed, rank, stage, task, its tag, wanted, seen


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
        **{name: 2 * rows * width * pair for name, width in slotted.items()},
        "index_scores": rows * max_pages * PAGE * word,
        "selection": rows * config.index_topk * word,
        "partial_out": rows * splits * shape.heads * config.kv_lora_rank * word,
        "partial_stat": rows * splits * shape.heads * 2 * word,
        "best": blocks * rows * 2 * pair,
        "logit_flags": blocks * pair,
        "next_tokens": rows * pair,
        "cache_flags": rows * pair,
        "score_flags": rows * max_pages * pair,
        "selection_flags": rows * pair,
        "partial_flags": rows * splits * pair,
        "error": (1 + blocks) * ERROR_WORDS * word,
        "logits": rows * shape.vocab * word,
        "adjusted": rows * shape.vocab * word,
        "tokens_out": MAX_TOKENS * rows * word,
    }


class MegaPath:
    """Decode steps of up to 16 rows, one launch each (or `mega_tasks` of them, split at layer borders: the same bits).

    blocks: blocks of the launch, None for as many as the device can hold at once. max_model_len: longest context.
    activations: what weights meet, see activations.py. timeline: the kernel stamps what its blocks do, for `timeline`.
    group: the ranks that share the model, of which `weights` are one's part (rocmega.parallel): every rank makes a
    MegaPath and gives it the same steps. pipeline: the other nodes, where `weights` are of one node's layers; they do
    likewise, one after the other.
    Raises ToolchainError or DriverError if the kernel cannot be built or made resident, ConfigError if the model's
    dimensions do not fit its tiles.
    """

    tokens_per_launch = MAX_TOKENS

    def __init__(
        self,
        config: GlmConfig,
        weights: GlmWeights,
        cache: PagedCache,
        driver: Driver,
        *,
        blocks: int | None = None,
        max_rows: int = kernel.ROWS,
        max_model_len: int,
        mega_tasks: int = 1,
        activations: str = "auto",
        artifact: Artifact | None = None,
        timeline: bool = False,
        group: Group | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        if not 1 <= max_rows <= kernel.ROWS:
            raise RequestError(f"max_rows={max_rows}: the mega-task takes 1 to {kernel.ROWS} rows.")
        whose, mine = (weights.tp, weights.rank), (group.tp, group.rank) if group else (1, 0)
        if whose != mine:
            raise RequestError(f"the weights are those of (ranks, rank) {whose}, and this is {mine}.")
        self.config, self.weights, self.cache, self.driver = config, weights, cache, driver
        if timeline and mega_tasks > 1:
            raise RequestError("A timeline is of one launch: use mega_tasks=1.")
        self.max_rows, self.max_model_len, self.stamped = max_rows, max_model_len, timeline
        self.group, self.pipeline = group, pipeline
        self.activations = choose(weights.formats, activations)
        self.max_pages = -(-max_model_len // PAGE)
        self.layer_splits = split_layers(weights.section, mega_tasks)
        self._header = descriptor.load(kernel.FOLDER / "descriptor.h")
        self._function = self._load(artifact)
        self._many: Function | None = None  # for several tokens a launch, made when first wanted
        self._ring: TokenRing | None = None  # likewise
        self._running: Running | None = None  # the last launch of several tokens
        self._flight: TokenLaunch | None = None
        resident = driver.max_blocks(self._function, kernel.THREADS, self._dynamic_lds)
        self.blocks = min(resident, driver.facts().compute_units) if blocks is None else blocks
        self._keep: list[torch.Tensor] = []  # tensors whose addresses the kernel has
        self._addresses: list[torch.Tensor] = []  # of all ranks' buffers
        self._regions: dict[str, SharedBuffer] = {}
        self._symmetric: dict[str, SymmetricBuffer] = {}
        self._args = self._header.structs["DecodeArgs"]()
        self._args_bytes = torch.zeros(ctypes.sizeof(self._args), dtype=torch.uint8, device=driver.device)
        self._fill_constants()
        try:
            self._open_regions()
        except BaseException:
            self.close()
            raise

    @property
    def launches_per_step(self) -> int:
        """Kernel launches of one decode step, on this node."""
        return len(self.layer_splits)

    def decode(
        self, batch: StepBatch, *, logits: bool = True, choices: Sequence[Choice | None] | None = None
    ) -> StepResult:
        """Runs one step: reads and extends the cache, gives each row's next token.

        choices: how each row's token is chosen; None is its largest logit. Raises RequestError if the batch does not
        fit, StepError if the kernel gave up waiting.
        """
        self.place(batch, logits=logits, choices=choices)
        self.enqueue()
        return self.result()

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
        Raises RequestError if that cannot be done in one launch.
        """
        self._check_many(batch, tokens, stops)
        self.place(batch, logits=False, choices=choices)
        rows, steps = batch.rows, torch.arange(tokens, dtype=torch.int32)[:, None]
        self._positions[:tokens, :rows] = self._first_written[:tokens, :rows] = batch.positions + steps
        self._stops.fill_(-1)
        for row, ends in enumerate(stops):
            self._stops[row, : len(ends)] = torch.tensor(list(ends), dtype=torch.int32)
        self._count, self._streams = tokens, True
        self._ring = ring = self._ring or TokenRing(self.driver, MAX_TOKENS, kernel.ROWS)
        self._args.ring, self._args.cancel = ring.address, ring.cancel_address
        ring.begin()
        self.enqueue()
        assert self._running is not None
        span = self._tags_of_token
        tag = self._args.epoch + span - 1  # of what is chosen: the last of its token
        self._flight = TokenLaunch(ring, self._running, rows, tokens, tag, span, stops, self._raise_if_given_up)
        return self._flight

    def _check_many(self, batch: StepBatch, tokens: int, stops: Sequence[Collection[int]]) -> None:
        whole = self.launches_per_step == 1 and self.pipeline is None
        if self.weights.tp > 1 or not whole or not 1 <= tokens <= MAX_TOKENS:
            raise RequestError(
                f"{tokens} tokens in a launch: one rank can do 1 to {MAX_TOKENS}, in a launch that has all layers."
            )
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
        batch.check(
            vocab=self.config.vocab_size,
            cache_pages=self.cache.pages,
            max_rows=self.max_rows,
            max_model_len=self.max_model_len,
        )
        rows, args = batch.rows, self._args
        self._tokens[:rows] = batch.tokens
        self._positions[0, :rows] = batch.positions
        self._first_written[0, :rows] = batch.first_written()
        self._count, self._streams = 1, False
        pages = min(batch.block_table.shape[1], self.max_pages)
        self._block_table[:rows, :pages] = batch.block_table[:, :pages]
        args.rows = rows
        drawn = choices if choices is not None and any(choice is not None for choice in choices) else None
        # A draw needs the whole vocabulary. Of several ranks each has a part: they draw when the kernel has ended.
        self._chosen, self._drawn = (drawn is not None, None) if self.weights.tp == 1 else (False, drawn)
        self._logits, self._leaves_logits = logits, logits or drawn is not None
        if drawn is not None and self._chosen:
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
        args.epoch = self._next_epoch(self._count)
        args.logits = self._regions["logits"].address if self._leaves_logits else 0
        args.choices = self.driver.constant(self._choices.choices) if self._chosen else 0
        for number, (begin, end) in enumerate(self.layer_splits):
            args.layer_begin, args.layer_end = begin, end
            sent = self.pipeline is not None and self.pipeline.node > 0 and number == 0
            args.border = self._border_address if sent else 0
            self._launch()
            yield end - 1

    @contextlib.contextmanager
    def lost_layer(self, layer: int, polls: int) -> Iterator[None]:
        """Fault injection: inside, no launch runs this layer, as if the blocks that should had died; a wait of another
        layer for what it makes gives up after so many polls.
        """
        splits, limit = self.layer_splits, self._args.poll_limit
        parts = [(begin, end) for begin, end in ((0, layer), (layer + 1, self.config.num_hidden_layers)) if begin < end]
        self.layer_splits, self._args.poll_limit = parts, polls
        try:
            yield
        finally:
            self.layer_splits, self._args.poll_limit = splits, limit

    def result(self) -> StepResult:
        """Waits for what was enqueued and gives it. Raises StepError if the kernel gave up waiting."""
        self.driver.synchronize()
        self._raise_if_given_up()
        rows = self._args.rows
        tokens = self._view("tokens_out", torch.int32)[:rows].cpu().clone()  # on the CPU, .cpu() is no copy
        logits = self._gather_logits(rows) if self._logits or self._drawn else None
        if logits is not None and self._drawn is not None:  # the same bits and random numbers, so the same tokens
            tokens = torch.tensor(choose_rows(logits, self._drawn), dtype=torch.int32)
        if self.pipeline is not None:
            tokens = self.pipeline.from_last(tokens)
            logits = self.pipeline.from_last(logits) if logits is not None and self._logits else None
        return StepResult(tokens, logits if self._logits else None)

    def residual(self) -> torch.Tensor:
        """The residual stream that the last step's layers here left, float32 [rows, hidden] on the device; a copy."""
        x = self._view("x", torch.float32).view(2, kernel.ROWS, self.config.hidden_size, 2)
        return x[0, : self._args.rows, :, 0].clone()  # x of an even number, 2 * layers; [1] is the tag

    def _gather_logits(self, rows: int) -> torch.Tensor:
        mine = self._view("logits", torch.float32).view(kernel.ROWS, -1)[:rows]
        return mine if self.group is None else torch.cat(self.group.all_gather(mine), dim=1)

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
        self._close_regions()

    def _close_regions(self) -> None:
        for symmetric in reversed(self._symmetric.values()):
            symmetric.close()
        for buffer in self._regions.values():
            buffer.close()
        self._symmetric, self._regions = {}, {}

    def timeline(self) -> Timeline:
        """What the blocks did in the last step. Raises RequestError if there is none, or no timeline=True."""
        if not self.stamped:
            raise RequestError("This mega-task makes no stamps: make it with timeline=True.")
        if not self._epoch:
            raise RequestError("There is no timeline: the mega-task has not run a step.")
        self.driver.synchronize()
        return read_timeline(
            self._view("timeline", torch.int32).view(self.blocks, CAPACITY, 4).cpu(),
            self._view("timeline_count", torch.int32).cpu(),
            stages=self._function.stages,
            epoch=self._args.epoch,
            layers=self.config.num_hidden_layers,
            arch=self.driver.arch,
        )

    def region(self, name: str, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """A hand-off region as it is now, for tests and debugging."""
        return self._view(name, dtype)

    def _view(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._regions[name].tensor.view(dtype)

    @property
    def _dynamic_lds(self) -> int:
        return kernel.LDS_WORDS[self.driver.arch] * 4 if self.driver.name == "cuda" else 0

    def _load(self, artifact: Artifact | None, many: bool = False) -> Function:
        if artifact is None:
            unit = kernel.unit(
                self.config,
                self.weights.formats,
                self.driver.arch,
                activations=self.activations,
                tp=self.weights.tp,
                timeline=self.stamped and not many,
                many=many,
            )
            artifact = compile_unit(unit, self.driver.arch)
        stages = descriptor.load(kernel.FOLDER / "stages.h").enums["Stage"]
        return self.driver.load(artifact).function(kernel.KERNEL, [name.lower() for name in stages])

    def _launch(self) -> None:
        self._args_bytes.copy_(torch.frombuffer(bytearray(self._args), dtype=torch.uint8))
        address = self.driver.constant(self._args_bytes)
        shape = (address, self.blocks, kernel.THREADS, self._dynamic_lds)
        if not self._streams:
            return self.driver.launch(self._function, *shape)
        self._many = self._many or self._load(None, many=True)
        self._running = self.driver.start(self._many, *shape)

    def _raise_if_given_up(self) -> None:
        launch, *blocks = self._view("error", torch.int32).view(-1, ERROR_WORDS).tolist()
        if not launch[0]:
            return
        if self.group is None:
            self._open_regions()  # whatever is half done in them must not be met by a later step
        stuck = [
            (tag, stage, block, words)
            for block, words in enumerate(blocks)
            if words[0]
            for stage, tag in [words[2:5:2]]
        ]
        _, stage, block, words = min(stuck)  # the furthest behind: nearest to the cause
        _, rank, _, task, _, wanted, seen, peer = words
        facts = (rank, block, self._function.stage(stage), task, wanted, seen)
        error = StepError(*facts, peer=peer - 1 if peer else None)
        raise StepError(*facts, self.group.failure(str(error)), peer=error.peer) if self.group else error

    @property
    def _tags_of_token(self) -> int:
        return 2 * self.config.num_hidden_layers + 2

    def _next_epoch(self, tokens: int) -> int:
        """Tags of a token are epoch ... epoch + 2 * layers + 1, and grow."""
        span = self._tags_of_token
        if self._epoch + (tokens + 1) * span >= LAST_EPOCH:
            self._open_regions()
        self._epoch += tokens * span
        return self._epoch - (tokens - 1) * span

    def _open_regions(self) -> None:
        """Fresh regions, all zero, with epochs from the start: no tag of before can be taken for one of later."""
        self._close_regions()
        if self._ring is not None:
            self._ring.clear()
        self._epoch = 0
        exact = self.weights.formats.cache == "f32"
        sizes = region_bytes(self.config, self.weights.tp, self.max_pages, self.blocks, exact=exact)
        if self.stamped:
            sizes |= {"timeline": self.blocks * CAPACITY * 16, "timeline_count": self.blocks * 4}
            self._args.timeline_capacity = CAPACITY
        for name, nbytes in sizes.items():
            self._regions[name] = self.driver.shared(name, nbytes)
            setattr(self._args, name, self._regions[name].address)
        if self.group is not None and self.weights.tp > 1:
            self._open_symmetric(self.group)

    def _open_symmetric(self, group: Group) -> None:
        self._addresses = []
        for name, (nbytes, stride) in symmetric_bytes(self.config, self.weights.tp).items():
            self._symmetric[name] = group.symmetric(self.driver, name, nbytes, stride)
            table = torch.tensor(self._symmetric[name].addresses, dtype=torch.int64, device=self.driver.device)
            self._addresses.append(table)
            setattr(self._args, name, self.driver.constant(table))

    def _fill_constants(self) -> None:
        args, device, rows = self._args, self.driver.device, kernel.ROWS
        self._tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._border = torch.zeros(rows, self.config.hidden_size, device=device)
        self._positions = torch.zeros(MAX_TOKENS, rows, dtype=torch.int32, device=device)
        self._first_written = torch.zeros(MAX_TOKENS, rows, dtype=torch.int32, device=device)
        self._stops = torch.full((rows, self._header.constants["STOPS"]), -1, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(rows, self.max_pages, dtype=torch.int32, device=device)
        args.version = self._header.constants["DESCRIPTOR_VERSION"]
        args.layers = self.config.num_hidden_layers
        args.poll_limit = (self.group.poll_limit(self.driver) if self.group else None) or POLL_LIMIT
        args.rank = self.weights.rank
        args.max_pages = self.max_pages
        vocab = self.config.vocab_size
        self._choices = ChoiceTable(self._header.structs, rows, vocab, self.max_model_len, device)
        args.adjustments = self._constant(self._choices.adjustments)
        args.adjustment_stride = self._choices.stride
        self._border_address = self._constant(self._border)
        args.tokens_in = self._constant(self._tokens)
        args.positions = self._constant(self._positions)
        args.stops = self._constant(self._stops)
        args.first_written = self._constant(self._first_written)
        args.block_table = self._constant(self._block_table)
        rope = rope_angles(torch.arange(self.max_model_len), self.config.rope_theta, self.config.qk_rope_head_dim)
        args.rope = self._constant(rope.to(device))
        args.embedding = self._constant(self.weights.embedding)
        args.final_norm = self._constant(self.weights.final_norm)
        self._put_matrix(args.head, self.weights.head)
        table = (self._header.structs["LayerWeights"] * args.layers)()
        for number, (entry, layer) in enumerate(zip(table, self.weights.layers, strict=True)):
            self._fill_layer(entry, number, layer)
        args.weights = self._constant(torch.frombuffer(bytearray(table), dtype=torch.uint8).to(device))

    def _fill_layer(self, entry: Any, number: int, layer: Layer) -> None:
        for name, value in layer.items():
            if isinstance(value, PackedMatrix):
                self._put_matrix(getattr(entry, name), value)
            else:
                setattr(entry, name, self._constant(value))
        if not layer:  # another node's: the norm that would meet what leaves this one, for nobody
            entry.attention_norm = self._constant(self.weights.final_norm)
        entry.dense = self.config.dense_layers[number]
        entry.full_index = self.config.full_index[number]
        entry.latent_cache = self.cache.latent_address(number)
        entry.index_cache = self.cache.index_address(number)

    def _put_matrix(self, entry: Any, matrix: PackedMatrix) -> None:
        entry.tiles = self._constant(matrix.tiles)
        entry.scales = 0 if matrix.scales is None else self._constant(matrix.scales)

    def _constant(self, tensor: torch.Tensor) -> int:
        self._keep.append(tensor)
        return self.driver.constant(tensor)
