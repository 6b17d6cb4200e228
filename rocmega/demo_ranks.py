"""The demo on several ranks: the mega-task, whose kernels sum over the ranks, beside PyTorch and beside one rank.

Every rank runs `run`; `rocmega demo --ranks N` starts torchrun, which starts them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocmega.progress import Progress, silent

if TYPE_CHECKING:
    from rocmega.llm import LLM

GRACE_SECONDS = 8.0  # for a rank that is told to end: it may be about to find out, and say, which rank failed


@dataclass
class RankRun:
    """What one path did on one rank. step_ms: of each decode step; launches: by the driver, over all steps."""

    tokens: list[int]
    step_ms: list[float]
    launches: int

    @property
    def median_ms(self) -> float:
        """The middle one of its steps, of which the first prepares things and is left out."""
        ordered = sorted(self.step_ms[1:] or self.step_ms)
        return ordered[len(ordered) // 2]


@dataclass
class RanksComparison:
    """The result, as rank 0 has it. runs: path -> each rank's; alone: the mega-task with the whole model on rank 0."""

    model: str
    where: str
    carrier: str  # of the standard path's sums
    alone: RankRun
    runs: dict[str, list[RankRun]] = field(default_factory=dict)
    nodes: int = 1

    @property
    def agree(self) -> bool:
        """Whether all ranks, by both paths, chose the tokens that one rank chose."""
        return all(run.tokens == self.alone.tokens for runs in self.runs.values() for run in runs)

    @property
    def slowest(self) -> int:
        """The rank whose steps of the mega-task take longest."""
        medians = [run.median_ms for run in self.runs["mega"]]
        return medians.index(max(medians))

    @property
    def launches_per_token(self) -> float:
        """Of the mega-task, on each rank."""
        [count] = {run.launches for run in self.runs["mega"]}
        return count / len(self.alone.tokens)

    def report(self) -> dict[str, Any]:
        """For --json."""
        return {
            "model": self.model,
            "ranks": len(self.runs["mega"]),
            "nodes": self.nodes,
            "where": self.where,
            "tokens": self.alone.tokens,
            "agree": self.agree,
            "step_ms": {path: [run.median_ms for run in runs] for path, runs in self.runs.items()},
            "alone_step_ms": self.alone.median_ms,
            "slowest_rank": self.slowest,
            "launches_per_token": self.launches_per_token,
            "standard_path_sums_by": self.carrier,
        }


def start(ranks: int, arguments: list[str]) -> int:
    """Runs this demo under torchrun on this machine; its exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run([*command, "-m", "rocmega.demo", *arguments], check=False).returncode


def run(
    ranks: int,
    model: str = "glm-5.2-tiny",
    *,
    nodes: int = 1,
    tokens: int = 32,
    blocks: int | None = None,
    device: str = "auto",
    progress: Progress = silent,
) -> RanksComparison | None:
    """One rank's part; the very first one's gives the comparison, the others' None.

    ranks: of each node. Raises RocmegaError, which names the rank.
    """
    from rocmega.demo import checkpoint_of, prompt_of
    from rocmega.parallel.processes import join

    signal.signal(signal.SIGTERM, _end_after_grace)
    group = join(ranks, nodes)
    with tempfile.TemporaryDirectory(prefix="rocmega-demo-") as folder:
        made = group.agree("make the checkpoint", lambda: group.rank or checkpoint_of(model, Path(folder)))
        checkpoint = Path(group.gather(str(made))[0])
        prompt, runs, places = prompt_of(model), {}, {}
        for path in ("mega", "standard"):
            result, places[path] = _decode(checkpoint, prompt, path, tokens, blocks, device, progress, ranks, nodes)
            runs[path] = group.gather_world(result)
        alone = None
        if group.rank == group.node == 0:
            alone, _ = _decode(checkpoint, prompt, "mega", tokens, blocks, device, progress)
        group.gather_world(None)  # the checkpoint is rank 0's
    group.close()
    if alone is None:
        return None
    carrier = "gloo" if places["mega"].startswith("the CPU") else "NCCL or RCCL"
    return RanksComparison(model, places["mega"], carrier, alone, runs, nodes)


def _decode(
    checkpoint: Path,
    prompt: list[int],
    path: str,
    tokens: int,
    blocks: int | None,
    device: str,
    progress: Progress,
    ranks: int = 1,
    nodes: int = 1,
) -> tuple[RankRun, str]:
    from rocmega.llm import LLM, SamplingParams

    name = f"{path} on {ranks} ranks" if ranks > 1 else f"{path} on one rank"
    name += f" of each of {nodes} nodes" if nodes > 1 else ""
    shared = {"tensor_parallel_size": ranks, "pipeline_parallel_size": nodes}
    options: dict[str, Any] = {**shared, "device": device, "path": path, "blocks": blocks}
    with LLM(
        checkpoint,
        max_rows=1,
        max_model_len=len(prompt) + tokens,
        progress=lambda text, done=0, total=0: progress(f"{name}: {text}", done, total),
        **options,
    ) as llm:
        launches, step_ms = _count(llm)
        [output] = llm.generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
        return RankRun(output.outputs[0].token_ids, step_ms, len(launches)), llm.runner.where


def _count(llm: LLM) -> tuple[list[int], list[float]]:
    """Lists that fill while the model decodes: an entry for each launch, and each step's milliseconds."""
    launches: list[int] = []
    step_ms: list[float] = []
    runner: Any = llm.runner
    step = runner.step

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = step(*args, **kwargs)
        step_ms.append(1000 * (time.perf_counter() - begin))
        return result

    runner.step = timed
    if runner.driver is not None:
        launch = runner.driver.launch

        def counted(*args: Any, **kwargs: Any) -> Any:
            launches.append(1)
            return launch(*args, **kwargs)

        runner.driver.launch = counted
    return launches, step_ms


def _end_after_grace(*_: object) -> None:
    ender = threading.Timer(GRACE_SECONDS, os._exit, [128 + signal.SIGTERM])
    ender.daemon = True
    ender.start()
