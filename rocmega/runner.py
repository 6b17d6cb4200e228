"""A loaded model and its two paths: prefill, and single decode steps over a paged cache.

This is the layer under `LLM`: it owns weights, cache and device, and knows nothing of prompts and sampling.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rocmega.errors import ConfigError, DriverError, PeerError, RequestError, ToolchainError
from rocmega.policy import (
    MEGA_ROWS,
    NOT_LOADED,
    PATHS,
    Decision,
    Measured,
    StepPath,
    StepShape,
    choose,
    refusals,
)
from rocmega.progress import Progress, silent
from rocmega.sampling.choose import choose_rows

if TYPE_CHECKING:
    import torch

    from rocmega.drivers.base import Driver
    from rocmega.parallel import Group, Pipeline
    from rocmega.ring import TokenLaunch
    from rocmega.sampling.choose import Choice
    from rocmega.step import StepBatch
    from rocmega.timeline import Producers, Timeline

DEFAULT_CONTEXT = 4096


@dataclass
class CachedSequence:
    """A request's place in the cache; `length` tokens of it are cached."""

    runner: Runner
    number: int
    length: int = 0

    def close(self) -> None:
        """Gives its pages back."""
        self.runner.cache.release(self.number)
        self.length = 0


@dataclass(frozen=True)
class Step:
    """What a decode step gave: its path and each row's token.

    logits: the model's, f32 [rows, vocab]. residual: what its layers left, f32 [rows, hidden]. None if not asked for.
    """

    decision: Decision
    tokens: list[int]
    logits: torch.Tensor | None
    residual: torch.Tensor | None = None


class Runner:
    """Loads a checkpoint directory for a device. The arguments are those of `rocmega.LLM`."""

    def __init__(
        self,
        directory: Path,
        *,
        device: str = "auto",
        path: str = "auto",
        max_rows: int = MEGA_ROWS,
        max_model_len: int | None = None,
        cache_pages: int | None = None,
        blocks: int | None = None,
        seed: int | None = None,
        activations: str = "auto",
        kv_cache_dtype: str = "auto",
        timeline: bool = False,
        group: Group | None = None,
        pipeline: Pipeline | None = None,
        progress: Progress = silent,
    ) -> None:
        from rocmega import registry
        from rocmega.packing import find

        if not 1 <= max_rows <= MEGA_ROWS:
            raise RequestError(f"max_rows={max_rows}: one step takes 1 to {MEGA_ROWS} rows.")
        if blocks is not None and blocks < 1:
            raise RequestError(f"blocks={blocks}: the mega-task needs at least one block.")
        self.group, self.pipeline = group, pipeline
        self.tp, self.rank = (group.tp, group.rank) if group is not None else (1, 0)
        packed = find(directory, self.tp, self.rank)
        self.packed = packed is not None
        directory = packed or directory
        self.directory = directory
        self.config: Any = registry.load_config(directory)
        self.family = str(registry.read_config(directory)["model_type"])
        if pipeline is not None and not hasattr(self.config, "sections"):
            raise RequestError(f"Nodes cannot share the layers of a model of family {self.family!r} yet.")
        self._section: range | None = None if pipeline is None else self.config.sections(pipeline.nodes)[pipeline.node]
        self.max_rows = max_rows
        self.max_model_len = self._context(max_model_len)
        self._blocks = blocks
        self._stamped = timeline
        self._progress = progress
        self._missing: tuple[str, ...] = NOT_LOADED
        self._fused_missing: tuple[str, ...] = NOT_LOADED
        self._numbers = itertools.count()
        self.driver = self._open_driver(device, path, seed)
        if self.group is not None:
            self._check_ranks(self.group)
        self.weights: Any = self._checkpoint_weights(activations) if packed is None else self._packed_weights(packed)
        self.activations: str = self._module("activations").choose(self.weights.formats, activations)
        self.cache = self._new_cache(cache_pages, kv_cache_dtype)
        self.standard: Any = self._module("standard").StandardPath(
            self.config, self.weights, self.cache, activations=self.activations, **self._shared()
        )
        self._mega: Any = None
        self._fused: Any = None
        self.measured: tuple[Measured, ...] = ()  # what path "auto" knows of this model on this device
        try:
            if path in ("auto", "mega"):
                self._prepare_mega(may_fall_back=path == "auto")
            if path in ("auto", "fused"):
                self._prepare_fused()
        except BaseException:
            self.close()  # nobody else can: there is no runner to close
            raise
        if path == "auto" and group is None:  # a rank's own measurements could send it another way than the others
            self.use_measurements()

    @property
    def device(self) -> torch.device:
        """Where weights and cache are."""
        import torch

        return self.driver.device if self.driver is not None else torch.device(self._torch_device)

    @property
    def target(self) -> str:
        """What kernels are compiled for, "none" without a driver."""
        return self.driver.arch if self.driver is not None else "none"

    @property
    def where(self) -> str:
        """Device and target, for people."""
        if self.driver is None:
            return f"PyTorch on {'the CPU' if self.device.type == 'cpu' else self.device}"
        facts = self.driver.facts()
        return f"the CPU target, {facts.name}" if facts.arch == "host" else f"{facts.name} ({facts.arch})"

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context_limit(self) -> int:
        """The longest context that the checkpoint allows."""
        return self.config.max_position_embeddings

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.config.eos_token_ids)

    def sequence(self) -> CachedSequence:
        """A new request, with nothing cached."""
        return CachedSequence(self, next(self._numbers))

    def prefill(
        self,
        sequence: CachedSequence,
        tokens: Sequence[int],
        observe: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor | None:
        """Caches tokens after those that are there, by the standard path.

        observe: given the residual stream that the layers leave, f32 [tokens, hidden], piece by piece. Returns the last
        one's logits, f32 [vocab]; None if there are no tokens. Raises RequestError if the cache is full.
        """
        import torch

        if not tokens:
            return None
        self.cache.grow(sequence.number, sequence.length + len(tokens))
        [row] = self.block_table([sequence])
        ids = torch.tensor(tokens, dtype=torch.int32)
        seen = {} if observe is None else {"observe": observe}
        logits = self.standard.prefill(ids, sequence.length, row, **seen)
        sequence.length += len(tokens)
        return logits

    def step(
        self,
        rows: Sequence[tuple[CachedSequence, int]],
        path: str = "auto",
        *,
        logits: bool = False,
        residual: bool = False,
        choices: Sequence[Choice | None] | None = None,
    ) -> Step:
        """Runs one token of each row and gives the next one of each.

        Several rows of one sequence, one after the other, are its successive tokens. path: "auto", or one by name.
        choices: how each row's token is chosen; None is the largest logit. Raises RequestError if the path that was
        asked for cannot run it, with all reasons.
        """
        choices = choices or [None] * len(rows)
        features = {"sampling" if any(choices) else "greedy"}
        features |= {name for name, wanted in (("logits", logits), ("residual", residual)) if wanted}
        sequences = [sequence for sequence, _ in rows]
        if len({sequence.number for sequence in sequences}) < len(rows):
            features.add("drafts")
        decision = self.decide(sequences, path, frozenset(features))
        batch = self._batch(rows)
        if decision.path == "mega":
            result = self._mega.decode(batch, logits=logits, choices=choices)
            left = self._mega.residual() if residual else None
            step = Step(decision, result.tokens.tolist(), result.logits, left)
        elif residual:
            values, left = self.standard.decode_with_residual(batch)
            step = Step(decision, choose_rows(values, choices), values, left)
        else:
            values = (self._fused if decision.path == "fused" else self.standard).decode(batch)
            step = Step(decision, choose_rows(values, choices), values)
        for sequence, _ in rows:
            sequence.length += 1
        return step

    def start(
        self,
        rows: Sequence[tuple[CachedSequence, int]],
        count: int,
        stops: Sequence[Collection[int]],
        path: str = "auto",
        choices: Sequence[Choice | None] | None = None,
    ) -> TokenLaunch | str:
        """Starts a launch of up to `count` tokens of each row; where only single steps can be done, says why.

        stops: of each row, tokens at which the launch ends. The rows are different sequences, with pages for all of it;
        whoever reads the launch counts what they have cached. Until it is over nothing else may run.
        """
        sequences = [sequence for sequence, _ in rows]
        drawn = any(choices or ())
        if self.decide(sequences, path, frozenset({"sampling" if drawn else "greedy"}), count).path != "mega":
            return "the mega-task does not run these steps"
        if not hasattr(self._mega, "launch_many"):
            return f"models of family {self.family!r} have no launches of several steps yet"
        if self.pipeline is not None:
            return "nodes take turns with a step"
        if self.tp > 1 and drawn:
            return "ranks draw from the logits of all, when a step's launch is over"
        launch: TokenLaunch = self._mega.launch_many(self._batch(rows), count, stops, choices)
        return launch

    def decide(
        self,
        sequences: Sequence[CachedSequence],
        path: str = "auto",
        features: frozenset[str] = frozenset({"greedy"}),
        steps: int = 1,
    ) -> Decision:
        """The path of the next step of these rows."""
        context = max(_positions(sequences)) + steps
        shape = self._shape(len(sequences), context, features)
        if path == "auto":
            return choose(replace(shape, measured=self.measured))
        asked = cast("StepPath", path)
        if reasons := refusals(shape, asked):
            names = {"mega": "mega-task", "fused": "fused path"}
            raise RequestError(f"The {names[asked]} cannot run this step: {'; '.join(reasons)}. Use path='auto'.")
        return Decision(asked)

    def use_measurements(self) -> None:
        """From now on path "auto" knows what `rocmega tune` has found for this model on this device."""
        from rocmega.tuning import load

        self.measured = load(self)

    @property
    def paths(self) -> tuple[StepPath, ...]:
        """The paths that are loaded."""
        return tuple(path for path in PATHS if {"mega": self._mega, "fused": self._fused}.get(path, True) is not None)

    def timeline(self) -> Timeline:
        """What the mega-task's blocks did in its last step. Raises RequestError if it has run none, or stamps none."""
        if self._mega is None:
            raise RequestError("There is no timeline: the mega-task does not run here.")
        made: Timeline = self._mega.timeline()
        return made

    def stage_producers(self) -> Producers:
        """Whom each stage of the mega-task waits for: what `Timeline.diagnosis` asks."""
        found: Producers = self._module("flow").PRODUCERS
        return found

    def close(self) -> None:
        """Gives back the device memory."""
        if self._mega is not None and hasattr(self._mega, "close"):
            self._mega.close()
        self.cache.close()
        if self.driver is not None and hasattr(self.driver, "close"):
            self.driver.close()

    def _check_ranks(self, group: Group) -> None:
        from rocmega.parallel import traps

        mine = group.agree("open its device", lambda: traps.account(self.driver))
        traps.check_equal(group.gather(mine))

    def _checkpoint_weights(self, activations: str) -> Any:
        from rocmega.checkpoint import Checkpoint

        checkpoint = Checkpoint(self.directory)
        label = f"packing the weights of {self.directory.name}"
        self._progress(label)
        weights = self._module("weights").pack(
            checkpoint,
            self.config,
            lambda done, total: self._progress(label, done, total),
            device=self.device,
            arch=None if self.driver is None else self.driver.arch,
            tp=self.tp,
            rank=self.rank,
            activations=activations,
            **({} if self._section is None else {"section": self._section}),
        )
        checkpoint.close()
        return weights

    def _packed_weights(self, directory: Path) -> Any:
        from rocmega.models.common.weights import is_of
        from rocmega.packing import open_pack
        from rocmega.packing.plan import DRAFT

        pack = open_pack(directory)
        # The standard path understands every architecture's bytes; kernels only their own.
        pack.check_for(arch=None if self.driver is None else self.driver.arch, tp=self.tp, rank=self.rank)
        fields = pack.load(
            self.device, wanted=lambda field: not field.startswith(DRAFT) and is_of(field, self._section)
        )
        return self._module("weights").assemble(pack.formats, self.config, fields)

    def _shared(self) -> dict[str, Any]:
        """What a path is told of the other ranks and nodes."""
        others = {"group": self.group, "pipeline": self.pipeline}
        return {name: value for name, value in others.items() if value is not None}

    def _module(self, name: str) -> Any:
        from rocmega import registry

        return registry.family_module(self.family, name)

    def _context(self, asked: int | None) -> int:
        limit = self.context_limit
        if asked is None:
            return min(limit, DEFAULT_CONTEXT)
        if not 2 <= asked <= limit:
            raise RequestError(f"max_model_len={asked}: this checkpoint allows contexts of 2 to {limit} tokens.")
        return asked

    def _open_driver(self, device: str, path: str, seed: int | None) -> Driver | None:
        """The device's driver; None if the standard path has to do without, which needs torch only."""
        from rocmega.drivers.select import kind_for, pick
        from rocmega.parallel import local_rank

        self._torch_device = "cpu" if kind_for(device) == "host" else "cuda"
        if self.group is not None and self._torch_device == "cuda":
            import torch

            self._torch_device = f"cuda:{local_rank()}"
            torch.cuda.set_device(local_rank())  # for what takes the current one: NCCL, streams
        if path == "standard":
            return None
        try:
            return pick(device, index=None if self.group is None else local_rank(), seed=seed)
        except DriverError as error:
            if path == "mega" or device != "auto":
                raise
            self._missing = (str(error),)
            return None

    def _new_cache(self, pages: int | None, asked: str) -> Any:
        from rocmega.cache import PAGE, TorchMemory

        if pages is None:
            pages = self.max_rows * -(-self.max_model_len // PAGE)
        known = self._module("config").CACHE_FORMATS
        if asked != "auto" and asked not in known:
            raise RequestError(f"kv_cache_dtype={asked!r}: this model's cache knows {', '.join(('auto', *known))}.")
        spec = self.config.cache_spec(self.weights.formats.cache if asked == "auto" else asked)
        if self._section is not None:
            spec = replace(spec, section=self._section)
        return spec.open(pages, self.max_rows, self.driver or TorchMemory(self._torch_device))

    def _prepare_mega(self, may_fall_back: bool) -> None:
        if self.driver is not None:
            self._missing = ()
        if refusals(self._shape(rows=1, context=1), "mega"):
            return  # each step will say why
        self._progress("preparing the mega-task")
        try:
            self._mega = self._module("mega").MegaPath(
                self.config,
                self.weights,
                self.cache,
                self.driver,
                blocks=self._blocks,
                max_rows=self.max_rows,
                max_model_len=self.max_model_len,
                activations=self.activations,
                timeline=self._stamped,
                **self._shared(),
            )
        except (ConfigError, ToolchainError, DriverError, PeerError) as error:
            if not may_fall_back:
                raise
            self._missing = (str(error),)

    def _prepare_fused(self) -> None:
        self._fused_missing = () if self.pipeline is None else ("the fused path has all layers, and this node a part",)
        if refusals(self._shape(rows=1, context=1), "fused"):
            return  # each step will say why
        from rocmega.fused.steps import FusedSteps

        try:
            model = (self.config, self.weights, self.cache)
            self._fused = FusedSteps(lambda: self._module("fused"), *model, max_model_len=self.max_model_len)
        except ConfigError as error:
            self._fused_missing = (str(error),)

    def _shape(self, rows: int, context: int, features: frozenset[str] = frozenset({"greedy"})) -> StepShape:
        return StepShape(
            family=self.family,
            format=self.weights.formats.label,
            target=self.target,
            rows=rows,
            context=context,
            max_rows=self.max_rows,
            max_model_len=self.max_model_len,
            ranks=self.tp,
            features=features,
            activations=self.activations,
            missing=self._missing,
            fused_missing=self._fused_missing,
        )

    def _batch(self, rows: Sequence[tuple[CachedSequence, int]]) -> StepBatch:
        import torch

        from rocmega.step import StepBatch

        positions = _positions([sequence for sequence, _ in rows])
        for (sequence, _), position in zip(rows, positions, strict=True):
            self.cache.grow(sequence.number, position + 1)
        batch = StepBatch(
            tokens=torch.tensor([token for _, token in rows], dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int32),
            block_table=self.block_table([sequence for sequence, _ in rows]),
        )
        batch.check(
            vocab=self.vocab_size,
            cache_pages=self.cache.pages,
            max_rows=self.max_rows,
            max_model_len=self.max_model_len,
        )
        return batch

    def block_table(self, sequences: Sequence[CachedSequence]) -> torch.Tensor:
        """The sequences' pages, int32 [sequences, pages of max_model_len]."""
        from rocmega.cache import PAGE

        width = -(-self.max_model_len // PAGE)
        return self.cache.block_table([sequence.number for sequence in sequences], width)


def _positions(sequences: Sequence[CachedSequence]) -> list[int]:
    """Where each row's token goes: after what is cached, and after the sequence's rows before it."""
    taken = Counter[int]()
    out = []
    for sequence in sequences:
        out.append(sequence.length + taken[sequence.number])
        taken[sequence.number] += 1
    return out
