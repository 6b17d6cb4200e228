"""What the mega-task paths of all families share: launches, hand-off regions, results, errors.

A family's own is its kernel, the regions of its descriptor, and how it fills in weights, caches and a step's input.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rocmega import descriptor
from rocmega.cache import PAGE
from rocmega.checkpoint.tiles import PackedMatrix
from rocmega.errors import RequestError, StepError
from rocmega.models.common.activations import choose
from rocmega.models.common.kernel import ROWS, THREADS
from rocmega.sampling.device import ChoiceTable
from rocmega.step import StepResult
from rocmega.timeline import CAPACITY, Timeline
from rocmega.timeline import read as read_timeline
from rocmega.toolchain import compile as compile_unit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rocmega.drivers.base import Driver, Function, SharedBuffer
    from rocmega.models.common.weights import Layer
    from rocmega.parallel import Group, SymmetricBuffer
    from rocmega.sampling.choose import Choice
    from rocmega.step import StepBatch
    from rocmega.toolchain import Artifact

POLL_LIMIT = 20_000_000  # polls before a wait gives up: some 10 s of a poll each half microsecond
LAST_EPOCH = 1 << 31  # flags are compared as signed differences; regions begin anew before tags get that large
ERROR_WORDS = 8  # of each block, after those of the launch: claimed, rank, stage, task, its tag, wanted, seen


class DecodePath(ABC):
    """Decode steps of up to 16 rows, one launch each (or `mega_tasks` of them, split at layer borders: the same bits).

    blocks: blocks of the launch, None for as many as the device can hold at once. max_model_len: longest context.
    activations: what weights meet, see activations.py. timeline: the kernel stamps what its blocks do, for `timeline`.
    one_row: steps of one row have a kernel of their own, which is faster and gives the same bits; None: on a GPU.
    group: the ranks that share the model, of which `weights` are one's part (rocmega.parallel): every rank makes a
    MegaPath and gives it the same steps.
    Raises ToolchainError or DriverError if the kernel cannot be built or made resident, ConfigError if the model's
    dimensions do not fit its tiles.

    Fields of a family's class:
        kernel: its module `kernel`: KERNEL, FOLDER, lds_words() and unit().
        tokens_per_launch: how many a launch can run.
    """

    kernel: ModuleType
    tokens_per_launch: ClassVar[int] = 1
    _count = 1  # tokens of each row in the next launch

    def __init__(
        self,
        config: Any,
        weights: Any,
        cache: Any,
        driver: Driver,
        *,
        blocks: int | None = None,
        max_rows: int = ROWS,
        max_model_len: int,
        mega_tasks: int = 1,
        activations: str = "auto",
        artifact: Artifact | None = None,
        timeline: bool = False,
        one_row: bool | None = None,
        group: Group | None = None,
    ) -> None:
        if not 1 <= max_rows <= ROWS:
            raise RequestError(f"max_rows={max_rows}: the mega-task takes 1 to {ROWS} rows.")
        whose, mine = (weights.tp, weights.rank), (group.tp, group.rank) if group else (1, 0)
        if whose != mine:
            raise RequestError(f"the weights are those of (ranks, rank) {whose}, and this is {mine}.")
        self.config, self.weights, self.cache, self.driver = config, weights, cache, driver
        if timeline and mega_tasks > 1:
            raise RequestError("A timeline is of one launch: use mega_tasks=1.")
        self.max_rows, self.max_model_len, self.stamped, self.group = max_rows, max_model_len, timeline, group
        self.activations = choose(weights.formats, activations)
        self.max_pages = -(-max_model_len // PAGE)
        self.layer_splits = split_layers(self._section(), mega_tasks)
        self._header = descriptor.load(self.kernel.FOLDER / "descriptor.h")
        apart = driver.name in ("hip", "cuda") if one_row is None else one_row
        self._apart = apart and artifact is None
        self._function, self._one_row = self._variants(artifact, timeline=timeline)
        resident = [driver.max_blocks(f, THREADS, self._dynamic_lds) for f in (self._function, self._one_row)]
        self.blocks = min(*resident, driver.facts().compute_units) if blocks is None else blocks
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
        """Kernel launches of one decode step."""
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

    def place(self, batch: StepBatch, *, logits: bool = True, choices: Sequence[Choice | None] | None = None) -> None:
        """Gives the next steps their input. Raises RequestError if the batch does not fit."""
        batch.check(
            vocab=self.config.vocab_size,
            cache_pages=self.cache.pages,
            max_rows=self.max_rows,
            max_model_len=self.max_model_len,
        )
        rows = batch.rows
        self._tokens[:rows] = batch.tokens
        pages = min(batch.block_table.shape[1], self.max_pages)
        self._block_table[:rows, :pages] = batch.block_table[:, :pages]
        self._place_rows(batch)
        self._args.rows = rows
        drawn = choices if choices is not None and any(choice is not None for choice in choices) else None
        self._logits, self._leaves_logits = logits, logits or drawn is not None
        self._chosen = drawn is not None
        if drawn is not None:
            self._place_choices(drawn)

    def _place_choices(self, drawn: Sequence[Choice | None]) -> None:
        """Some row's token is not its largest logit. Raises RequestError if that cannot be."""
        if self.weights.tp > 1:
            raise RequestError(
                "ranks that share a vocabulary choose greedily: leave sampling out, or use path='standard'."
            )
        self._choices.place(drawn)

    def enqueue(self) -> None:
        """Launches the step that was placed, without waiting for it. Once more, it gives the same again."""
        for _ in self.launches():
            pass

    def launches(self) -> Iterator[int]:
        """The same, one launch at a time: yields each one's last layer."""
        args = self._args
        args.epoch = self._next_epoch(self._count)
        args.logits = self._regions["logits"].address if self._leaves_logits else 0
        args.choices = self.driver.constant(self._choices.choices) if self._chosen else 0
        for begin, end in self.layer_splits:
            args.layer_begin, args.layer_end = begin, end
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
        return StepResult(
            tokens=self._view("tokens_out", torch.int32)[:rows].cpu().clone(),  # on the CPU, .cpu() is no copy
            logits=self._gather_logits(rows) if self._logits else None,
        )

    def _gather_logits(self, rows: int) -> torch.Tensor:
        mine = self._view("logits", torch.float32).view(ROWS, -1)[:rows]
        return mine if self.group is None else torch.cat(self.group.all_gather(mine), dim=1)

    def close(self) -> None:
        """Frees what the launches write; the cache and the weights are the caller's. Ranks close together."""
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
        words = self.kernel.lds_words(self.config, self.driver.arch)
        return 4 * words if self.driver.name == "cuda" else 0

    def _variants(self, artifact: Artifact | None = None, **options: bool) -> tuple[Function, Function]:
        """The kernel's function for any number of rows, and for one, which may be the same.

        artifact: what to take for both instead of building. options: of the kernel's unit().
        """
        if artifact is not None:
            return (function := self._load(artifact)), function
        units = [
            self.kernel.unit(
                self.config,
                self.weights.formats,
                self.driver.arch,
                activations=self.activations,
                tp=self.weights.tp,
                **options,
                one_row=one_row,
            )
            for one_row in ((False, True) if self._apart else (False,))
        ]
        with ThreadPoolExecutor() as pool:  # compilers run side by side
            made = [self._load(artifact) for artifact in pool.map(lambda u: compile_unit(u, self.driver.arch), units)]
        return made[0], made[-1]

    def _load(self, artifact: Artifact) -> Function:
        stages = descriptor.load(self.kernel.FOLDER / "stages.h").enums["Stage"]
        return self.driver.load(artifact).function(self.kernel.KERNEL, [name.lower() for name in stages])

    def _launch(self) -> None:
        self.driver.launch(self._one_row if self._args.rows == 1 else self._function, *self._launch_shape())

    def _launch_shape(self) -> tuple[int, int, int, int]:
        """Address of the arguments, as they are now; blocks, threads, bytes of dynamic LDS."""
        self._args_bytes.copy_(torch.frombuffer(bytearray(self._args), dtype=torch.uint8))
        return self.driver.constant(self._args_bytes), self.blocks, THREADS, self._dynamic_lds

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
        self._epoch = 0
        sizes = self._region_bytes()
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
        for name, (nbytes, stride) in self._symmetric_bytes().items():
            self._symmetric[name] = group.symmetric(self.driver, name, nbytes, stride)
            table = torch.tensor(self._symmetric[name].addresses, dtype=torch.int64, device=self.driver.device)
            self._addresses.append(table)
            setattr(self._args, name, self.driver.constant(table))

    def _fill_constants(self) -> None:
        args, device = self._args, self.driver.device
        self._tokens = torch.zeros(ROWS, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(ROWS, self.max_pages, dtype=torch.int32, device=device)
        args.version = self._header.constants["DESCRIPTOR_VERSION"]
        args.layers = self.config.num_hidden_layers
        args.poll_limit = (self.group.poll_limit(self.driver) if self.group else None) or POLL_LIMIT
        args.rank = self.weights.rank
        args.max_pages = self.max_pages
        vocab = self.config.vocab_size
        self._choices = ChoiceTable(self._header.structs, ROWS, vocab, self.max_model_len, device)
        args.adjustments = self._constant(self._choices.adjustments)
        args.adjustment_stride = self._choices.stride
        args.tokens_in = self._constant(self._tokens)
        args.block_table = self._constant(self._block_table)
        args.embedding = self._constant(self.weights.embedding)
        args.final_norm = self._constant(self.weights.final_norm)
        self._put_matrix(args.head, self.weights.head)
        self._fill_model()
        table = (self._header.structs["LayerWeights"] * args.layers)()
        for number, (entry, layer) in enumerate(zip(table, self.weights.layers, strict=True)):
            self._fill_layer(entry, number, layer)
        args.weights = self._table(table)

    def _section(self) -> range:
        """The layers that this node runs."""
        return range(self.config.num_hidden_layers)

    def _symmetric_bytes(self) -> dict[str, tuple[int, int]]:
        return symmetric_bytes(self.config.hidden_size, self.weights.tp)

    @abstractmethod
    def _region_bytes(self) -> dict[str, int]:
        """Sizes of everything that a launch writes, by field of DecodeArgs; shapes as in descriptor.h."""

    @abstractmethod
    def _fill_model(self) -> None:
        """What of DecodeArgs is the family's own and stays as it is."""

    @abstractmethod
    def _fill_layer(self, entry: Any, number: int, layer: Layer) -> None:
        """One layer's entry of LayerWeights."""

    @abstractmethod
    def _place_rows(self, batch: StepBatch) -> None:
        """What of a step's input is the family's own. Raises RequestError if it cannot run the batch."""

    def _table(self, entries: ctypes.Array[Any]) -> int:
        return self._constant(torch.frombuffer(bytearray(entries), dtype=torch.uint8).to(self.driver.device))

    def _put_fields(self, entry: Any, layer: Layer) -> None:
        """Matrices and tensors to the entry's fields of their names."""
        for name, value in layer.items():
            if isinstance(value, PackedMatrix):
                self._put_matrix(getattr(entry, name), value)
            else:
                setattr(entry, name, self._constant(value))

    def _put_matrix(self, entry: Any, matrix: PackedMatrix) -> None:
        entry.tiles = self._constant(matrix.tiles)
        entry.scales = 0 if matrix.scales is None else self._constant(matrix.scales)

    def _constant(self, tensor: torch.Tensor) -> int:
        self._keep.append(tensor)
        return self.driver.constant(tensor)


def common_region_bytes(vocab: int, blocks: int) -> dict[str, int]:
    """Sizes of what every family's launch writes; vocab: of this rank."""
    pair, word = 8, 4
    return {
        "best": blocks * ROWS * 2 * pair,
        "logit_flags": blocks * pair,
        "next_tokens": ROWS * pair,
        "error": (1 + blocks) * ERROR_WORDS * word,
        "logits": ROWS * vocab * word,
        "adjusted": ROWS * vocab * word,
    }


def symmetric_bytes(hidden: int, tp: int) -> dict[str, tuple[int, int]]:
    """Sizes of what all ranks write, by field of DecodeArgs, and the stride from one rank's place to the next one's."""
    place = ROWS * hidden * 8
    return {
        "parts": (2 * tp * place, place),
        "candidates": (tp * ROWS * 2 * 8, ROWS * 2 * 8),
        "alarms": (4, 0),
    }


def split_layers(section: range, parts: int) -> list[tuple[int, int]]:
    """Contiguous ranges of a node's layers, as even as can be."""
    layers = len(section)
    if not 1 <= parts <= layers:
        raise RequestError(
            f"mega_tasks={parts}: a stack of {layers} layers can be split into 1 to {layers} mega-tasks."
        )
    borders = [section[0] + layers * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(borders))
