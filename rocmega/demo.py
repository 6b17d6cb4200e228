"""The demo: one tiny model, three ways to run it, and whether they agree.

A checkpoint with random weights is decoded greedily by the mega-task, by the standard path and by Hugging Face
transformers, which shares no code with the other two; where transformers does not know the model, by the family's own
second writing of it. With a prompt in text, the small trained model that comes with rocmega answers it, by the same
ways. `rocmega demo` prints the result; `python -m rocmega.demo` is the same command.
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
    """What one path did.

    `logits`: f32 [tokens, vocab]. `launches`: of one token; `counted` says what was counted. `text`: the answer, if the
    prompt was text.
    """

    tokens: list[int]
    logits: torch.Tensor
    where: str
    launches: float
    counted: str
    seconds: float
    text: str | None = None


@dataclass
class Comparison:
    """The demo's result. `runs` holds the paths that ran, `skipped` why another did not. `text`: the prompt's, if any.

    A prompt in text is answered to the answer's end, one of random tokens goes on for as long as was asked.
    """

    model: str
    device: str
    prompt: list[int]
    runs: dict[str, PathRun] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    text: str | None = None

    @property
    def agree(self) -> bool:
        """Whether all paths that ran chose the same tokens."""
        return len({tuple(run.tokens) for run in self.runs.values()}) == 1

    def logit_diff(self, one: str, other: str) -> float:
        """The largest difference of two paths' logits, over the steps that have the same tokens before them."""
        a, b = self.runs[one], self.runs[other]
        differ = (step for step, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y)
        steps = next(differ, min(len(a.tokens), len(b.tokens)) - 1) + 1
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
            "prompt": self.text,
            "prompt_token_ids": self.prompt,
            "texts": self._each("text"),
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

    Raises RocmegaError where a path of ours cannot run. Without transformers, ours alone are compared.
    """
    result = Comparison(model, "", prompt_of(model))
    with tempfile.TemporaryDirectory(prefix="rocmega-demo-") as folder:
        progress(f"making {model} with random weights")
        checkpoint = checkpoint_of(model, Path(folder))
        _compare(result, checkpoint, checkpoint, tokens, blocks, device, progress)
    return result


def answer(
    text: str, *, tokens: int = 32, blocks: int | None = None, device: str = "auto", progress: Progress = silent
) -> Comparison:
    """Lets the trained model go on from a text, to the end of its answer or for `tokens` tokens, by each path.

    All take the weights as they are stored, in FP8, and round nothing else: transformers gets the same values in
    float32. Raises as `run` does.
    """
    from rocmega.eval.formats import convert
    from rocmega.models.glm.training import SHIPPED
    from rocmega.tokenizer import Tokenizer

    result = Comparison(SHIPPED.name, "", Tokenizer(SHIPPED).encode(text), text=text)
    with tempfile.TemporaryDirectory(prefix="rocmega-demo-") as folder:
        twin = convert(SHIPPED, Path(folder) / SHIPPED.name, "f32")
        _compare(result, SHIPPED, twin, tokens, blocks, device, progress)
    return result


def _compare(
    result: Comparison,
    checkpoint: Path,
    twin: Path,
    tokens: int,
    blocks: int | None,
    device: str,
    progress: Progress,
) -> None:
    """Runs all paths. twin: the checkpoint's values in float32, for whom cannot read it."""
    from rocmega import registry

    config = registry.read_config(checkpoint)
    result.runs["mega"] = _ours(checkpoint, "mega", result, tokens, blocks, device, progress)
    result.runs["standard"] = _ours(checkpoint, "standard", result, tokens, blocks, device, progress)
    try:
        result.runs["transformers"] = _transformers(twin, config, result, tokens, progress)
    except ModuleNotFoundError as error:
        result.skipped["transformers"] = f"{error} (pip install 'rocmega[demo]')"
    except ImportError as error:
        result.skipped["transformers"] = str(error)
    if "transformers" in result.skipped and "text_config" in config:  # no released transformers knows these
        result.runs["reference"] = _reference(checkpoint, config, result.prompt, tokens, progress)


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

    settings: dict[str, Any] = {"max_model_len": len(result.prompt) + tokens, "blocks": blocks, "progress": show}
    with LLM(checkpoint, device=device, path=path, max_rows=1, activations="f32", **settings) as llm:
        import torch

        logits: list[torch.Tensor] = []
        launches = _count_mega(llm) if path == "mega" else _count_standard(llm)
        start = time.perf_counter()
        [output] = llm.generate(
            result.prompt,
            SamplingParams(max_tokens=tokens, ignore_eos=result.text is None),
            observer=lambda request, number, row: logits.append(row.float().cpu().clone()),
        )
        seconds = time.perf_counter() - start
        if path == "mega" or not result.device:
            result.device = llm.runner.target
        [made] = output.outputs
        count, counted = launches(len(made.token_ids))
        text = None if result.text is None else made.text
        return PathRun(made.token_ids, torch.stack(logits), llm.runner.where, count, counted, seconds, text)


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
    checkpoint: Path, config: dict[str, Any], result: Comparison, tokens: int, progress: Progress
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
    ends = set() if result.text is None else set(config["eos_token_id"])
    chosen: list[int] = []
    rows: list[torch.Tensor] = []
    launches = (0, "not counted: fewer than two tokens")
    start = time.perf_counter()
    with torch.no_grad():
        output = model(input_ids=torch.tensor([result.prompt]), use_cache=True)
        for step in range(tokens):
            progress("transformers: decoding", step, tokens)
            rows.append(output.logits[0, -1].float())
            chosen.append(int(rows[-1].argmax()))
            if step == tokens - 1 or chosen[-1] in ends:
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
    text = None
    if result.text is not None:
        text = str(transformers.AutoTokenizer.from_pretrained(checkpoint).decode(chosen, skip_special_tokens=True))
    return PathRun(chosen, torch.stack(rows), where, *launches, seconds, text)


if __name__ == "__main__":
    import sys

    from rocmega.cli import main

    main(["demo", *sys.argv[1:]])
