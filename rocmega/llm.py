"""The public API, in the shape users know from vLLM.

    llm = LLM("path/to/checkpoint")
    [result] = llm.generate([3, 1, 4], SamplingParams(max_tokens=32))
    result.outputs[0].token_ids

Several prompts are decoded together, as rows of one step at different positions. A prompt but for its last token goes
through the standard path (prefill); that token and every generated one through the mega-task, one launch a step.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rocmega import policy
from rocmega.errors import RequestError, RocmegaError
from rocmega.outputs import CompletionOutput as CompletionOutput
from rocmega.outputs import RequestOutput as RequestOutput
from rocmega.progress import Progress, silent
from rocmega.prompts import Prompt, as_list, token_ids
from rocmega.sampling import SamplingParams as SamplingParams

if TYPE_CHECKING:
    import torch

    from rocmega.engine import Engine, Request
    from rocmega.engine.thread import EngineThread
    from rocmega.runner import Runner
    from rocmega.tokenizer import Tokenizer

Observer = Callable[[int, int, "torch.Tensor"], None]
Sampling = SamplingParams | Sequence[SamplingParams] | None
PATHS = ("auto", *policy.PATHS)


class LLM:
    """A model that is loaded and ready.

    model: a checkpoint directory (config.json and safetensors, as published). tensor_parallel_size: how many
    ranks share the model; every one is a process, `torchrun --nproc-per-node N program.py` starts them, and all make
    the same calls, each of which returns the whole result. pipeline_parallel_size: how many nodes, each of so many
    ranks, divide the layers (docs/cluster.md). device: "auto" (a GPU if torch sees one, else the CPU
    target), "host", "hip" or "cuda". path: "auto" runs each step by the mega-task where it can, else by
    fused Triton kernels where they can, else by the standard path, or by the one that `rocmega tune` found to be the
    fastest; "mega" and "fused" refuse instead of falling back, "standard" never uses either. max_rows: how
    many requests run at once, at most 16; others wait. max_model_len: the longest context, prompt and answer
    together; None is what the checkpoint allows, at most 4096. cache_pages: pages of 64 tokens of the cache; None is
    enough for max_rows requests of max_model_len. prefill_chunk: how many tokens of a prompt one step caches, and the
    grain in which prompts share their beginning. draft_tokens: how many tokens may be guessed ahead for each request
    in each step, and checked in rows to spare; the answer stays the same. draft_method: where guesses come from:
    "lookup", what followed the same tokens before; "mtp", the checkpoint's layer for it, where it has one.
    tokens_per_launch: how many steps the mega-task may do in one launch, "auto" for as many as it can; tokens are read
    while it runs, and a request that joins or leaves ends it within a token.
    blocks: blocks of the mega-task; None is one per compute unit (a few
    on the CPU target). Any number gives the same bits. seed: of the CPU target's scheduler; None is plain order.
    activations: how exact they are when they meet big matrices: "bf16"; "fp8", quantized per group where the weights
    are FP8 or MXFP4; "f32", not rounded at all, to compare with (from a checkpoint, not a pack); "auto" is f32 for
    float32 checkpoints and bf16 for all others. kv_cache_dtype: how the cache is stored, where a model leaves a choice:
    DeepSeek's "f32", "bf16" or "published" (FP8 and FP4 records, to which it was trained); "auto" is as exact as the
    activations. timeline: the mega-task stamps what its blocks do, at some
    cost, for `runner.timeline()`. progress: told about long work (rocmega.progress).

    Raises ConfigError, CheckpointError, ToolchainError, DriverError or RequestError, each with one paragraph for a
    person.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        device: str = "auto",
        path: str = "auto",
        max_rows: int = 16,
        max_model_len: int | None = None,
        cache_pages: int | None = None,
        prefill_chunk: int | None = None,
        draft_tokens: int = 0,
        draft_method: str = "lookup",
        tokens_per_launch: int | Literal["auto"] = 1,
        blocks: int | None = None,
        seed: int | None = None,
        activations: str = "auto",
        kv_cache_dtype: str = "auto",
        timeline: bool = False,
        progress: Progress = silent,
    ) -> None:
        if path not in PATHS:
            raise RequestError(f"path={path!r}: choose one of {', '.join(PATHS)}.")
        if tensor_parallel_size < 1:
            raise RequestError(f"tensor_parallel_size={tensor_parallel_size}: at least one rank is needed.")
        if pipeline_parallel_size < 1:
            raise RequestError(f"pipeline_parallel_size={pipeline_parallel_size}: at least one node is needed.")
        from rocmega.engine import Engine
        from rocmega.engine.engine import PREFILL_CHUNK
        from rocmega.parallel.processes import join
        from rocmega.runner import Runner
        from rocmega.tokenizer import find

        self._progress = progress
        ranks, nodes = tensor_parallel_size, pipeline_parallel_size
        group = join(ranks, nodes) if ranks * nodes > 1 else None

        def load() -> Runner:
            return Runner(
                Path(model),
                device=device,
                path=path,
                max_rows=max_rows,
                max_model_len=max_model_len,
                cache_pages=cache_pages,
                blocks=blocks,
                seed=seed,
                activations=activations,
                kv_cache_dtype=kv_cache_dtype,
                timeline=timeline,
                group=group,
                pipeline=None if group is None else group.pipeline,
                progress=progress,
            )

        self._runner = load() if group is None else group.agree("load the model", load)
        self._tokenizer = find(self._runner.directory)
        chunk = PREFILL_CHUNK if prefill_chunk is None else prefill_chunk
        key = secrets.randbits(64)
        try:
            self._engine = Engine(
                self._runner,
                path=path,
                prefill_chunk=chunk,
                draft_tokens=draft_tokens,
                draft_method=draft_method,
                tokens_per_launch=tokens_per_launch,
                tokenizer=self._tokenizer,
                seed=key if group is None else group.gather_world(key)[0],  # all ranks draw the same
            )
        except RocmegaError:
            self._runner.close()
            raise
        self._thread: EngineThread | None = None

    @property
    def runner(self) -> Runner:
        """The layer below the engine: prefill and single steps."""
        return self._runner

    @property
    def engine(self) -> Engine:
        """The layer below: requests that join and leave a running batch."""
        return self._engine

    @property
    def max_model_len(self) -> int:
        return self._runner.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises RequestError if it has none."""
        if self._tokenizer is None:
            from rocmega.tokenizer import Tokenizer

            self._tokenizer = Tokenizer(self._runner.directory)
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Sampling = None,
        *,
        observer: Observer | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt: text, token ids, `{"prompt_token_ids": ids}`, or a list of any of them.

        One SamplingParams serves all prompts, or one for each. observer: called for each generated token with the
        prompt's number, the token's number and its logits (f32 [vocab], valid during the call). Raises RequestError
        for a prompt that cannot be run, before anything has.
        """
        requests = self.requests(prompts, sampling_params)
        if observer is not None:
            for number, request in enumerate(requests):
                request.observer = lambda token, logits, number=number: observer(number, token, logits)
        total = sum(request.sampling.max_tokens for request in requests)
        for _ in self._run(requests):
            self._progress("decoding", sum(len(request.token_ids) for request in requests), total)
        return [request.output() for request in requests]

    def stream(self, prompts: Prompt | Sequence[Prompt], sampling_params: Sampling = None) -> Iterator[RequestOutput]:
        """The same, as it comes: a request's answer so far, each time it has a token more, until all are finished.

        Leaving the loop early ends the requests.
        """
        requests = self.requests(prompts, sampling_params)
        mine = set(map(id, requests))
        for changed in self._run(requests):
            yield from (request.output() for request in changed if id(request) in mine)

    async def stream_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """One prompt's answer as it grows, for coroutines: a thread does the steps, for all that call at once."""
        [request] = self.requests([prompt], sampling_params)
        async for output in self.thread.stream(request):
            yield output

    async def generate_async(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """One prompt's whole answer, for coroutines."""
        [request] = self.requests([prompt], sampling_params)
        return [output async for output in self.thread.stream(request)][-1]

    def metrics(self) -> dict[str, Any]:
        """Counts since the model was loaded.

        prompt_tokens, of which reused_tokens were in the cache; generated_tokens; steps and tokens per path;
        coverage (each path's share of the tokens, None before the first) and mega_coverage, that of the mega-task;
        drafted_tokens that were guessed, accepted_tokens among them, and accepted_length, the tokens that a request's
        step with guesses gave on average (None if there was none); launches_of_several_steps; single_step_reasons (why
        a step was single though tokens_per_launch allows more -> steps); fallback_reasons (why a step was not the
        mega-task's -> steps); finished (how -> requests); preemptions; prefill_seconds and decode_seconds; requests
        running and waiting, and the cache's pages, as they are now.
        """
        counts, pages = self._engine.counts, self._engine.pages()
        tokens = {path: counts.tokens[path] for path in policy.PATHS}
        generated = sum(tokens.values())
        return {
            "prompt_tokens": counts.prompt_tokens,
            "reused_tokens": counts.reused_tokens,
            "generated_tokens": generated,
            "steps": {path: counts.steps[path] for path in policy.PATHS},
            "tokens": tokens,
            "mega_coverage": tokens["mega"] / generated if generated else None,
            "coverage": {path: count / generated for path, count in tokens.items()} if generated else None,
            "launches_of_several_steps": counts.launches,
            "drafted_tokens": counts.drafted,
            "accepted_tokens": counts.accepted,
            "accepted_length": 1 + counts.accepted / counts.drafted_steps if counts.drafted_steps else None,
            "single_step_reasons": dict(counts.single),
            "fallback_reasons": dict(counts.reasons),
            "finished": dict(counts.finished),
            "preemptions": counts.preemptions,
            "prefill_seconds": counts.prefill_seconds,
            "decode_seconds": counts.decode_seconds,
            "running": self._engine.running,
            "waiting": self._engine.waiting,
            "pages": vars(pages),
        }

    def close(self) -> None:
        """Gives back the device memory. The object cannot be used afterwards."""
        if self._thread is not None:
            self._thread.close()
        self._runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def thread(self) -> EngineThread:
        """What steps the engine for coroutines; made on first use."""
        if self._thread is None:
            from rocmega.engine.thread import EngineThread

            self._thread = EngineThread(self._engine)
        return self._thread

    def requests(self, prompts: Prompt | Sequence[Prompt], sampling: Sampling = None) -> list[Request]:
        """Requests for the engine. Raises RequestError if one of them can never run."""
        listed = as_list(prompts)
        each = [sampling or SamplingParams()] * len(listed) if not isinstance(sampling, Sequence) else list(sampling)
        if len(each) != len(listed):
            raise RequestError(
                f"{len(listed)} prompts but {len(each)} SamplingParams: give one for all, or one for each."
            )
        return [self._request(f"Prompt {number}", prompt, each[number]) for number, prompt in enumerate(listed)]

    def _request(self, name: str, prompt: Any, sampling: SamplingParams) -> Request:
        from rocmega.engine.request import Request, check

        text = prompt if isinstance(prompt, str) else None
        tokens = self.tokenizer.encode(text) if text is not None else token_ids(name, prompt)
        check(tokens, sampling, self._runner, name)
        return Request(tokens, sampling, text)

    def _run(self, requests: list[Request]) -> Iterator[list[Request]]:
        """Steps until all requests have ended. Whatever happens, none is left in the engine."""
        coming = deque(requests)
        try:
            while not all(request.finished for request in requests):
                while coming and self._engine.waiting < self._engine.max_waiting:
                    self._engine.add(coming.popleft())
                yield self._engine.step()
        finally:
            self._engine.abort(requests)
        for request in requests:
            if request.error is not None:
                raise request.error
