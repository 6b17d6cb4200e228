"""The public API, in the shape users know from vLLM.

    llm = LLM("path/to/checkpoint")
    [result] = llm.generate([3, 1, 4], SamplingParams(max_tokens=32))
    result.outputs[0].token_ids

Several prompts are decoded together, as rows of one step at different positions. A prompt but for its last token goes
through the standard path (prefill); that token and every generated one through the mega-task, one launch a step.
"""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rocmega.errors import RequestError
from rocmega.progress import Progress, silent

if TYPE_CHECKING:
    import torch

    from rocmega.runner import CachedSequence, Runner
    from rocmega.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Observer = Callable[[int, int, "torch.Tensor"], None]
PATHS = ("auto", "mega", "standard")


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Decoding is greedy: `temperature` may be None or 0.

    max_tokens: how many tokens to generate at most. ignore_eos: go on after an end-of-sequence token. stop_token_ids:
    end after one of these, too. Raises RequestError for values that are not possible.
    """

    max_tokens: int = 16
    temperature: float | None = None
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens={self.max_tokens}: at least one token must be asked for.")
        if self.temperature not in (None, 0):
            raise RequestError(
                f"temperature={self.temperature}: only greedy decoding is implemented, because its tokens can be "
                "compared bit for bit between paths. Leave temperature out or set it to 0."
            )


@dataclass
class CompletionOutput:
    """One answer. `text` is empty if the checkpoint has no tokenizer; `finish_reason` is "stop" or "length"."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"] | None = None


@dataclass
class RequestOutput:
    """A prompt with its answers (one, as decoding is greedy). `prompt` is None if it was given as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


@dataclass
class _Request:
    number: int
    cached: CachedSequence
    text: str | None
    tokens: list[int]
    sampling: SamplingParams
    generated: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None


class LLM:
    """A model that is loaded and ready.

    model: a checkpoint directory (config.json and safetensors, as published). device: "auto" (a GPU if torch sees one,
    else the CPU target), "host", "hip" or "cuda". path: "auto" runs each step by the mega-task where it can and else
    by the standard path, "mega" refuses instead of falling back, "standard" never uses the mega-task. max_rows: how
    many prompts one call may decode together, at most 16. max_model_len: the longest context, prompt and answer
    together; None is what the checkpoint allows, at most 4096. blocks: blocks of the mega-task; None is one per
    compute unit (a few on the CPU target). Any number gives the same bits. seed: of the CPU target's scheduler; None
    is plain order. progress: told about long work (rocmega.progress).

    Raises ConfigError, CheckpointError, ToolchainError, DriverError or RequestError, each with one paragraph for a
    person.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tensor_parallel_size: int = 1,
        device: str = "auto",
        path: str = "auto",
        max_rows: int = 16,
        max_model_len: int | None = None,
        blocks: int | None = None,
        seed: int | None = None,
        progress: Progress = silent,
    ) -> None:
        if path not in PATHS:
            raise RequestError(f"path={path!r}: choose one of {', '.join(PATHS)}.")
        if tensor_parallel_size != 1:
            raise RequestError(
                f"tensor_parallel_size={tensor_parallel_size}: only one rank is implemented. Leave it out, or 1."
            )
        from rocmega.runner import Runner

        self.path = path
        self._progress = progress
        self._runner = Runner(
            Path(model),
            device=device,
            path=path,
            max_rows=max_rows,
            max_model_len=max_model_len,
            blocks=blocks,
            seed=seed,
            progress=progress,
        )
        self._tokenizer: Tokenizer | None = None
        self._requests = 0
        self._steps: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._seconds = {"prefill": 0.0, "decode": 0.0}

    @property
    def runner(self) -> Runner:
        """The layer below: prefill and single steps."""
        return self._runner

    @property
    def max_model_len(self) -> int:
        return self._runner.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        observer: Observer | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt: text, token ids, `{"prompt_token_ids": ids}`, or a list of any of them.

        One SamplingParams serves all prompts, or one for each. observer: called for each generated token with the
        prompt's number, the token's number and its logits (f32 [vocab], valid during the call). Raises RequestError
        for a prompt that cannot be run, before anything has.
        """
        requests = self._requests_of(prompts, sampling_params)
        try:
            for request in requests:
                self._prefill(request)
            longest = max(request.sampling.max_tokens for request in requests)
            for done in range(longest):
                self._progress("decoding", done, longest)
                running = [request for request in requests if request.finish_reason is None]
                if not running:
                    break
                self._step(running, observer)
        finally:
            for request in requests:
                request.cached.close()
        return [self._output(request) for request in requests]

    def metrics(self) -> dict[str, Any]:
        """Counts since the model was loaded.

        prompt_tokens, generated_tokens, steps per path, mega_coverage (the share of steps that the mega-task ran, None
        before the first), fallback_reasons (reason -> steps), prefill_seconds and decode_seconds.
        """
        steps = {path: self._steps[path] for path in ("mega", "standard")}
        total = sum(steps.values())
        return {
            "prompt_tokens": self._counts["prompt"],
            "generated_tokens": self._counts["generated"],
            "steps": steps,
            "mega_coverage": steps["mega"] / total if total else None,
            "fallback_reasons": dict(self._reasons),
            "prefill_seconds": self._seconds["prefill"],
            "decode_seconds": self._seconds["decode"],
        }

    def close(self) -> None:
        """Gives back the device memory. The object cannot be used afterwards."""
        self._runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests_of(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[_Request]:
        listed = _as_list(prompts)
        each = [sampling or SamplingParams()] * len(listed) if not isinstance(sampling, Sequence) else list(sampling)
        if len(each) != len(listed):
            raise RequestError(
                f"{len(listed)} prompts but {len(each)} SamplingParams: give one for all, or one for each."
            )
        if len(listed) > self._runner.max_rows:
            raise RequestError(
                f"{len(listed)} prompts at once, but the model was loaded for max_rows={self._runner.max_rows}. Load "
                "it with more (at most 16), or generate in several calls."
            )
        return [self._request(number, prompt, each[number]) for number, prompt in enumerate(listed)]

    def _request(self, number: int, prompt: Prompt, sampling: SamplingParams) -> _Request:
        text = prompt if isinstance(prompt, str) else None
        tokens = self.tokenizer.encode(text) if text is not None else _token_ids(number, prompt)
        if not tokens:
            raise RequestError(f"Prompt {number} is empty: generation starts from at least one token.")
        vocab = self._runner.vocab_size
        bad = next((token for token in tokens if not 0 <= token < vocab), None)
        if bad is not None:
            raise RequestError(f"Prompt {number} holds token {bad}; this model's tokens are 0 to {vocab - 1}.")
        if len(tokens) + sampling.max_tokens > self.max_model_len:
            raise RequestError(
                f"Prompt {number} has {len(tokens)} tokens and asks for {sampling.max_tokens} more, together over the "
                f"longest context of {self.max_model_len} (max_model_len). Ask for fewer, shorten the prompt, or load "
                f"the model with a larger max_model_len (its checkpoint allows {self._runner.context_limit})."
            )
        return _Request(number, self._runner.sequence(), text, tokens, sampling)

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises RequestError if it has none."""
        if self._tokenizer is None:
            from rocmega.tokenizer import Tokenizer

            self._tokenizer = Tokenizer(self._runner.directory)
        return self._tokenizer

    def _prefill(self, request: _Request) -> None:
        start = time.perf_counter()
        self._runner.prefill(request.cached, request.tokens[:-1])
        self._counts["prompt"] += len(request.tokens)
        self._seconds["prefill"] += time.perf_counter() - start

    def _step(self, running: list[_Request], observer: Observer | None) -> None:
        start = time.perf_counter()
        rows = [(request.cached, (request.generated or request.tokens)[-1]) for request in running]
        result = self._runner.step(rows, self.path, logits=observer is not None)
        self._steps[result.decision.path] += 1
        self._reasons.update(result.decision.reasons)
        self._counts["generated"] += len(running)
        for row, request in enumerate(running):
            if observer is not None and result.logits is not None:
                observer(request.number, len(request.generated), result.logits[row])
            self._accept(request, result.tokens[row])
        self._seconds["decode"] += time.perf_counter() - start

    def _accept(self, request: _Request, token: int) -> None:
        request.generated.append(token)
        sampling = request.sampling
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self._runner.eos_token_ids)
        if token in ends:
            request.finish_reason = "stop"
        elif len(request.generated) == sampling.max_tokens:
            request.finish_reason = "length"

    def _output(self, request: _Request) -> RequestOutput:
        from rocmega.tokenizer import find

        if self._tokenizer is None:
            self._tokenizer = find(self._runner.directory)
        text = self._tokenizer.decode(request.generated) if self._tokenizer else ""
        completion = CompletionOutput(0, text, request.generated, request.finish_reason)
        self._requests += 1
        return RequestOutput(str(self._requests - 1), request.text, request.tokens, [completion])


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or several, as a list of prompts. A list of numbers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed = list(prompts)
    if not listed:
        raise RequestError("There is no prompt: give text or token ids.")
    several = [hasattr(item, "__len__") for item in listed]
    if any(several) and not all(several):
        raise RequestError("Prompts are mixed with single token ids: give a list of prompts, or the ids of one prompt.")
    return listed if all(several) else [listed]


def _token_ids(number: int, prompt: Any) -> list[int]:
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids")
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise RequestError(f"Prompt {number} is neither text nor a list of token ids.") from None
