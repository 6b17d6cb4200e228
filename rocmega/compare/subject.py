"""What every arm runs: one rank's weights, a cache full of noise, and batches over it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rocmega import registry
from rocmega.cache import PAGE
from rocmega.compare.options import Options
from rocmega.drivers.select import pick
from rocmega.errors import RequestError
from rocmega.progress import Progress, silent
from rocmega.step import StepBatch

if TYPE_CHECKING:
    from rocmega.drivers.base import Driver
    from rocmega.packing.plan import Field

CONTEXTS = {"host": (20, 96), "gpu": (1024, 8192, 60_000)}
RESERVE = 8 << 30  # of a GPU's memory: for what the arms allocate as they run


@dataclass
class Model:
    """A rank's part of a model, in memory.

    Fields:
        family: its model_type. whole: the model's configuration. shard: the rank's weights.
        config, weights: the part as a model of its own, in which its share stands for every rank's.
        fields: what was packed, for counting bytes. about: what these weights are, for people.
    """

    family: str
    whole: Any
    shard: Any
    fields: list[Field]
    about: str
    config: Any = field(init=False)
    weights: Any = field(init=False)

    def __post_init__(self) -> None:
        module = registry.family_module(self.family, "shard")
        self.config, self.weights = module.rank_config(self.whole, self.shard.tp), module.alone(self.shard)


def load(options: Options, driver: Driver, progress: Progress = silent) -> Model:
    """A preset with random weights, a checkpoint or a pack. Raises RocmegaError if there is no such model."""
    if options.model in registry.preset_names():
        return _random(registry.presets_of(options.model).preset(options.model), options, driver, progress)
    directory = Path(options.model)
    if not directory.is_dir():
        known = ", ".join(registry.preset_names())
        raise RequestError(f"--model {options.model!r} is neither a folder nor one of {known}.")
    if options.layers is not None or options.format is not None:
        raise RequestError("--layers and --format are for models by name, which have random weights.")
    return _stored(directory, options, driver, progress)


def _random(fields: dict[str, Any], options: Options, driver: Driver, progress: Progress) -> Model:
    from rocmega.models.common.random_weights import random_fields

    family = str(fields["model_type"])
    shard, weights = registry.family_module(family, "shard"), registry.family_module(family, "weights")
    whole, changed = shard.measurable(registry.family_module(family, "config").from_dict(fields))
    config = whole if options.layers is None else shard.first_layers(whole, options.layers)
    formats = weights.named_formats(config, options.format or ("f32" if options.model.endswith("-tiny") else None))
    plan = weights.plan(config, formats, tp=options.tp, arch=driver.arch, activations=options.activations)
    values = random_fields(
        plan,
        config.num_hidden_layers,
        driver.device,
        rank=options.rank,
        shares=options.tp,
        seed=options.seed,
        progress=progress,
        plain=shard.plain_fields(config),
    )
    packed = weights.assemble(plan.formats, config, values, options.tp, options.rank)
    about = "; ".join(filter(None, (f"random weights, made there, seed {options.seed}", changed)))
    return Model(family, config, packed, list(plan.fields.values()), about)


def _stored(directory: Path, options: Options, driver: Driver, progress: Progress) -> Model:
    from rocmega.packing import find, open_pack
    from rocmega.packing.plan import DRAFT

    tp, rank = options.tp, options.rank
    folder = find(directory, tp, rank)
    source = folder or directory
    family, whole = str(registry.read_config(source)["model_type"]), registry.load_config(source)
    weights = registry.family_module(family, "weights")
    if folder is not None:
        pack = open_pack(folder)
        pack.check_for(arch=driver.arch, tp=tp, rank=rank)
        packed = weights.assemble(pack.formats, whole, pack.load(driver.device), tp, rank)
        fields = [field for name, field in pack.fields.items() if not name.startswith(DRAFT)]
        return Model(family, whole, packed, fields, f"weights of the pack {folder.name}")
    from rocmega.checkpoint import Checkpoint

    checkpoint = Checkpoint(directory)
    wanted: dict[str, Any] = {"tp": tp, "arch": driver.arch, "activations": options.activations}
    plan = weights.plan_of(checkpoint, whole, **wanted)

    def show(done: int, total: int) -> None:
        progress("packing the weights", done, total)

    packed = weights.pack(checkpoint, whole, show, driver.device, rank=rank, **wanted)
    return Model(family, whole, packed, list(plan.fields.values()), f"weights of the checkpoint {directory.name}")


@dataclass
class Subject:
    """A model on a device, with a cache of noise, and the mega-task and standard paths over them, made when asked for.

    Fields:
        contexts: what is measured. pages: of the cache; `fits` says what has room in it.
    """

    options: Options
    driver: Driver
    model: Model
    contexts: tuple[int, ...]
    cache: Any
    _megas: dict[tuple[bool, int], Any] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, options: Options, progress: Progress = silent) -> Subject:
        """Raises RocmegaError if the device, the model or the cache cannot be had."""
        driver = pick(options.device)
        model = load(options, driver, progress)
        contexts = options.contexts or CONTEXTS["host" if driver.arch == "host" else "gpu"]
        longest = model.config.max_position_embeddings
        if max(contexts) > longest:
            raise RequestError(f"--contexts {max(contexts)}: the model's longest context is {longest} tokens.")
        progress("filling the cache with noise")
        spec = model.config.cache_spec(model.weights.formats.cache)
        most = max(0, _free_bytes(driver) - max(options.rows) * spec.state_bytes()) // spec.page_bytes()
        wanted = [_pages(rows, context) for rows in options.rows for context in contexts]
        possible = [pages for pages in wanted if pages <= most]
        if not possible:
            smallest, free = (pages * spec.page_bytes() / 1e9 for pages in (min(wanted), most))
            raise RequestError(
                f"the smallest cache that was asked for takes {smallest:.1f} GB beside the weights, and {free:.1f} GB "
                "are free: ask for fewer rows, contexts or layers."
            )
        cache = spec.open(max(possible), max(options.rows), driver)
        generator = torch.Generator(cache.device).manual_seed(options.seed)
        for pool in cache.memory():
            if pool.is_floating_point():
                pool.normal_(generator=generator)
            else:  # tokens
                pool.random_(0, model.config.vocab_size, generator=generator)
        return cls(options, driver, model, contexts, cache)

    @property
    def device(self) -> torch.device:
        return self.driver.device

    @property
    def activations(self) -> str:
        """What big matrices meet, in every arm."""
        return str(self.module("activations").choose(self.model.weights.formats, self.options.activations))

    @property
    def layers(self) -> int:
        return int(self.model.config.num_hidden_layers)

    def module(self, name: str) -> Any:
        """A module of the model's family."""
        return registry.family_module(self.model.family, name)

    def standard(self, **options: Any) -> Any:
        """A standard path over the same weights and cache; options: those of the family's StandardPath."""
        options = {"activations": self.activations, **options}
        return self.module("standard").StandardPath(self.model.config, self.model.weights, self.cache, **options)

    def following(self, **options: Any) -> Any:
        """The same, on choices that somebody else made."""
        options = {"activations": self.activations, **options}
        return self.module("following").FollowingPath(self.model.config, self.model.weights, self.cache, **options)

    def fused(self, max_model_len: int) -> Any:
        """The fused standard path, whose activations are bf16."""
        path = self.module("fused").FusedPath
        return path(self.model.config, self.model.weights, self.cache, max_model_len=max_model_len)

    def mega(self, *, alone: bool = False) -> Any:
        """The mega-task; alone: without hand-offs between ranks. Raises RocmegaError if it cannot be built here."""
        return self._kept_mega(alone, 1)

    def _kept_mega(self, alone: bool, mega_tasks: int) -> Any:
        key = alone, mega_tasks
        if key not in self._megas:
            self._megas[key] = self.make_mega(alone=alone, mega_tasks=mega_tasks)
        return self._megas[key]

    def mega_picks(self, batch: StepBatch, *, alone: bool = False) -> tuple[Any, torch.Tensor]:
        """What a step of the mega-task chooses, and its logits, from a launch for each layer."""
        mega = self._kept_mega(alone, self.layers)
        mega.place(batch)
        picks = self.module("picks").picks_of(mega)
        return picks, mega.result().logits.clone()

    def mega_with_timeline(self) -> Any:
        """A mega-task that stamps what its blocks do; the caller closes it."""
        return self.make_mega(timeline=True)

    def make_mega(self, *, alone: bool = False, **options: Any) -> Any:
        """Another one, which the caller closes; options: those of MegaPath."""
        from rocmega.parallel import Loopback

        tp, rank, model = self.options.tp, self.options.rank, self.model
        return self.module("mega").MegaPath(
            model.config if alone else model.whole,
            model.weights if alone else model.shard,
            self.cache,
            self.driver,
            max_model_len=max(self.contexts),
            activations=self.activations,
            group=None if alone or tp == 1 else Loopback(tp, rank),
            **{"blocks": self.options.blocks, **options},
        )

    def why_not(self, rows: int, context: int) -> str | None:
        """Why the cache has no room for these rows; None if it has."""
        short = _pages(rows, context) - self.cache.pages
        if short <= 0:
            return None
        size = self.cache.spec.page_bytes() / 1e9
        return f"no room: the cache has {self.cache.pages * size:.1f} GB, and {short * size:.1f} GB more are needed"

    def batch(self, rows: int, context: int) -> StepBatch:
        """Rows of different requests, each with `context` tokens, its own included. The batch before is void."""
        for row in range(max(self.options.rows)):
            self.cache.release(row)
        for row in range(rows):
            self.cache.grow(row, context)
        positions = torch.full((rows,), context - 1, dtype=torch.int32)
        return StepBatch(self._tokens(rows), positions, self.cache.block_table(range(rows)))

    def with_other_tokens(self, batch: StepBatch, draw: int) -> StepBatch:
        """The same rows at the same positions."""
        return dataclasses.replace(batch, tokens=self._tokens(batch.rows, draw))

    def step_bytes(self, rows: int, context: int) -> float:
        """Bytes that a step reads: rocmega.packing.traffic says what is counted."""
        return sum(self.stage_reads(rows, context).values())

    def stage_reads(self, rows: int, context: int) -> dict[str, float]:
        """The same by stage of the mega-task."""
        weights = self.model.weights
        reads = self.module("flow").stage_reads(self.model.config, weights.formats, self.model.fields, rows, context)
        return dict(reads)

    def close(self) -> None:
        """Gives the memory back."""
        for mega in self._megas.values():
            mega.close()
        self.cache.close()

    def _tokens(self, rows: int, draw: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.options.seed * 1000 + draw)
        return torch.randint(0, self.model.config.vocab_size, (rows,), generator=generator).to(torch.int32)


def _pages(rows: int, context: int) -> int:
    return rows * -(-context // PAGE)


def _free_bytes(driver: Driver) -> int:
    if driver.device.type == "cpu":
        return 8 << 30
    torch.cuda.empty_cache()  # what torch keeps for later is free
    free, _ = torch.cuda.mem_get_info(driver.device)
    return max(0, free - RESERVE)
