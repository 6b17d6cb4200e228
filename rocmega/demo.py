"""The demo: one tiny model, three ways to run it, and whether they agree.

A checkpoint with random weights is decoded greedily by the mega-task, by the standard path and by Hugging Face
transformers, which shares no code with the other two; where transformers does not know the model, by the family's own
second writing of it. `rocmega demo` prints the result; `python -m rocmega.demo` is the
same command.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocmega.errors import RequestError
from rocmega.progress import Progress, silent

if TYPE_CHECKING:
    import torch

    from rocmega.llm import LLM

PROMPT_TOKENS = 75  # more than the tiny models' index_topk: the selection has something to leave out
PATHS = ("mega", "standard", "transformers")  # and "reference" in place of the last


@dataclass
class PathRun:
    """What one path did. `logits`: f32 [tokens, vocab]. `launches`: of one token; `counted` says what was counted."""

    tokens: list[int]
    logits: torch.Tensor
    where: str
    launches: float
    counted: str
    seconds: float


@dataclass
class Comparison:
    """The demo's result. `runs` holds the paths that ran, `skipped` why another did not."""

    model: str
    device: str
    prompt: list[int]
    runs: dict[str, PathRun] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def agree(self) -> bool:
        """Whether all paths that ran chose the same tokens."""
        return len({tuple(run.tokens) for run in self.runs.values()}) == 1

    def logit_diff(self, one: str, other: str) -> float:
        """The largest difference of two paths' logits, over the steps that have the same tokens before them."""
        a, b = self.runs[one], self.runs[other]
        differ = (step for step, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y)
        steps = next(differ, len(a.tokens) - 1) + 1
        return float((a.logits[:steps] - b.logits[:steps]).abs().max())

    @property
    def max_logit_diff(self) -> float:
        """The largest difference between any two paths."""
        names = list(self.runs)
        return max(self.logit_diff(one, other) for at, one in enumerate(names) for other in names[at + 1 :])

    def report(self) -> dict[str, Any]:
        """For --json; a path that did not run is null."""
        return {
            "model": self.model,
            "device": self.device,
            "prompt_token_ids": self.prompt,
            "tokens": self._each("tokens"),
            "agree": self.agree,
            "max_logit_diff": self.max_logit_diff,
            "launches_per_token": self._each("launches"),
            "launches_counted": self._each("counted"),
            "where": self._each("where"),
            "seconds": self._each("seconds"),
            "skipped": self.skipped,
        }

    def _each(self, what: str) -> dict[str, Any]:
        paths = (*PATHS, *(path for path in self.runs if path not in PATHS))
        return {path: getattr(self.runs[path], what) if path in self.runs else None for path in paths}


def run(
    model: str = "glm-5.2-tiny",
    *,
    tokens: int = 32,
    blocks: int | None = None,
    device: str = "auto",
    progress: Progress = silent,
) -> Comparison:
    """Makes the model's checkpoint, decodes `tokens` tokens by each path and compares.

    Raises RocmegaError where the standard path cannot run, or a mega-task that there is. Without transformers, ours
    alone are compared.
    """
    from rocmega.policy import MEGA_FAMILIES

    prompt, config = prompt_of(model), _presets(model).preset(model)
    result = Comparison(model, "", prompt)
    with tempfile.TemporaryDirectory(prefix="rocmega-demo-") as folder:
        progress(f"making {model} with random weights")
        checkpoint = checkpoint_of(model, Path(folder))
        if config["model_type"] in MEGA_FAMILIES:
            result.runs["mega"] = _ours(checkpoint, "mega", result, tokens, blocks, device, progress)
        else:
            result.skipped["mega"] = f"there is none for model family {config['model_type']!r} yet"
        result.runs["standard"] = _ours(checkpoint, "standard", result, tokens, blocks, device, progress)
        try:
            result.runs["transformers"] = _transformers(checkpoint, config, prompt, tokens, progress)
        except ModuleNotFoundError as error:
            result.skipped["transformers"] = f"{error} (pip install 'rocmega[demo]')"
        except ImportError as error:
            result.skipped["transformers"] = str(error)
        if "transformers" in result.skipped and "text_config" in config:  # no released transformers knows these
            result.runs["reference"] = _reference(checkpoint, config, prompt, tokens, progress)
    return result


def _presets(model: str) -> Any:
    """The module that can make the model. Raises RequestError if there is none."""
    from rocmega import registry

    writable = [name for name in registry.preset_names() if name in registry.presets_of(name).WRITABLE]
    if model not in writable:
        raise RequestError(f"The demo cannot make the model {model!r}; it knows {', '.join(writable)}.")
    return registry.presets_of(model)


def prompt_of(model: str) -> list[int]:
    """The demo's prompt: random, and always the same. Raises RequestError for a model that it cannot make."""
    import torch

    config, generator = _presets(model).preset(model), torch.Generator().manual_seed(1)
    vocab = config.get("text_config", config)["vocab_size"]
    prompt: list[int] = torch.randint(vocab, (PROMPT_TOKENS,), generator=generator).tolist()
    return prompt


def checkpoint_of(model: str, folder: Path) -> Path:
    """Makes the model's checkpoint, with random weights, in a folder of its name; what it is called."""
    made: Path = _presets(model).write_checkpoint(model, folder / model)
    return made


def _ours(
    checkpoint: Path, path: str, result: Comparison, tokens: int, blocks: int | None, device: str, progress: Progress
) -> PathRun:
    from rocmega.llm import LLM, SamplingParams

    def show(text: str, done: int = 0, total: int = 0) -> None:
        progress(f"{path}: {text}", done, total)

    longest = len(result.prompt) + tokens
    with LLM(
        checkpoint, device=device, path=path, max_rows=1, max_model_len=longest, blocks=blocks, progress=show
    ) as llm:
        import torch

        logits: list[torch.Tensor] = []
        launches = _count_mega(llm) if path == "mega" else _count_standard(llm)
        start = time.perf_counter()
        [output] = llm.generate(
            result.prompt,
            SamplingParams(max_tokens=tokens, ignore_eos=True),
            observer=lambda request, number, row: logits.append(row.float().cpu().clone()),
        )
        seconds = time.perf_counter() - start
        if path == "mega" or not result.device:
            result.device = llm.runner.target
        count, counted = launches(tokens)
        return PathRun(output.outputs[0].token_ids, torch.stack(logits), llm.runner.where, count, counted, seconds)


def _count_mega(llm: LLM) -> Any:
    """Counts what goes through the driver: that is all that the mega-task launches."""
    driver: Any = llm.runner.driver
    launch, calls = driver.launch, []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return launch(*args, **kwargs)

    driver.launch = counting

    def per_token(tokens: int) -> tuple[float, str]:
        each, rest = divmod(len(calls), tokens)
        return len(calls) / tokens if rest else each, "what went through the driver, over all tokens"

    return per_token


def _count_standard(llm: LLM) -> Any:
    """Counts one step, the second: the first may prepare things."""
    from rocmega.launches import count

    standard = llm.runner.standard
    decode, calls, counted = standard.decode, [], []

    def counting(batch: Any) -> Any:
        calls.append(1)
        if len(calls) != 2:
            return decode(batch)
        results: list[Any] = []
        counted.append(count(lambda: results.append(decode(batch)), llm.runner.device))
        return results[0]

    standard.decode = counting
    return lambda tokens: counted[0] if counted else (0, "not counted: fewer than two tokens")


def _reference(checkpoint: Path, config: dict[str, Any], prompt: list[int], tokens: int, progress: Progress) -> PathRun:
    """Greedy decoding by the family's reference, token by token in float64 on the CPU."""
    import torch

    from rocmega import registry
    from rocmega.checkpoint import Checkpoint
    from rocmega.launches import count

    files = Checkpoint(checkpoint)
    weights = {name: files.tensor(name) for name in files.names()}
    reference = registry.family_module(config["model_type"], "reference").Reference(config["text_config"], weights)
    progress("reference: decoding")
    start = time.perf_counter()
    chosen, logits = reference.greedy(prompt, tokens)
    seconds = time.perf_counter() - start
    launches = count(lambda: reference.step(chosen[-1]), torch.device("cpu"))
    return PathRun(chosen, logits, "PyTorch on the CPU, float64", *launches, seconds)


def _transformers(
    checkpoint: Path, config: dict[str, Any], prompt: list[int], tokens: int, progress: Progress
) -> PathRun:
    """Greedy decoding by transformers' own class and cache, in float32 on the CPU. ImportError without it."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the checkpoint: ask no server
    progress("transformers: loading")
    import torch
    import transformers

    from rocmega.launches import count

    [architecture] = config["architectures"]
    if not hasattr(transformers, architecture):
        raise ImportError(f"transformers {transformers.__version__} does not know this model")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    of = getattr(transformers, architecture)
    model = of.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    chosen: list[int] = []
    rows: list[torch.Tensor] = []
    launches = (0, "not counted: fewer than two tokens")
    start = time.perf_counter()
    with torch.no_grad():
        output = model(input_ids=torch.tensor([prompt]), use_cache=True)
        for step in range(tokens):
            progress("transformers: decoding", step, tokens)
            rows.append(output.logits[0, -1].float())
            chosen.append(int(rows[-1].argmax()))
            if step == tokens - 1:
                break
            results: list[Any] = []

            def forward(past: Any = output.past_key_values, into: list[Any] = results) -> None:
                into.append(model(input_ids=torch.tensor([chosen[-1:]]), past_key_values=past, use_cache=True))

            if step == 0:
                launches = count(forward, torch.device("cpu"))
            else:
                forward()
            output = results[0]
    seconds = time.perf_counter() - start
    where = f"PyTorch on the CPU, transformers {transformers.__version__}"
    return PathRun(chosen, torch.stack(rows), where, *launches, seconds)


if __name__ == "__main__":
    import sys

    from rocmega.cli import main

    main(["demo", *sys.argv[1:]])
