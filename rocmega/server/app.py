"""The endpoints."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from rocmega import __version__
from rocmega.errors import RequestError, RocmegaError
from rocmega.outputs import RequestOutput
from rocmega.prompts import as_list
from rocmega.sampling import SamplingParams
from rocmega.server.answers import Chat, Completion, Shape
from rocmega.server.guards import BodyLimit, explain_errors, failure, key_check, log, status_of
from rocmega.server.metrics import EngineMetrics, Waits
from rocmega.server.protocol import ChatRequest, CompletionRequest, Sampled

if TYPE_CHECKING:
    from rocmega.engine import Request as EngineRequest
    from rocmega.llm import LLM

T = TypeVar("T")
CLIENT_LEFT = 499  # nobody will read it; for the access log


@dataclass(frozen=True)
class Options:
    """What a server allows.

    model_name: what clients call the model. api_key: asked of every client, if given. max_body_bytes: of a request.
    max_prompts: in one call.
    """

    model_name: str
    api_key: str | None = None
    max_body_bytes: int = 4 << 20
    max_prompts: int = 64


class Service:
    """Turns calls into requests to the engine, and what comes of them into answers."""

    def __init__(self, llm: LLM, options: Options) -> None:
        self.llm, self.options = llm, options
        self.registry = CollectorRegistry()
        self.registry.register(EngineMetrics(llm))
        self.waits = Waits(self.registry)

    async def complete(self, call: CompletionRequest, request: Request) -> Response:
        self._check_model(call)
        prompts = as_list(call.prompt)
        if len(prompts) > (1 if call.stream else self.options.max_prompts):
            limit = "one prompt in a stream" if call.stream else f"{self.options.max_prompts} prompts in one call"
            raise RequestError(f"{len(prompts)} prompts: this server takes {limit}.")
        sampling = call.sampling(call.max_tokens, call.logprobs)
        return await self._answer(
            call, request, Completion(self.options.model_name, call.return_token_ids), prompts, sampling
        )

    async def chat(self, call: ChatRequest, request: Request) -> Response:
        self._check_model(call)
        messages = [message.for_template() for message in call.messages]
        prompt = await run_in_threadpool(self._conversation, messages, call.chat_template_kwargs)
        sampling = call.sampling(call.max_new_tokens(self.llm.max_model_len - len(prompt)), call.logprobs_wanted())
        return await self._answer(
            call, request, Chat(self.options.model_name, call.return_token_ids), [prompt], sampling
        )

    def _conversation(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> list[int]:
        own = {"messages", "add_generation_prompt", "self"} & variables.keys()
        if own:
            raise RequestError(f"chat_template_kwargs may not set {', '.join(sorted(own))}.")
        return self.llm.tokenizer.apply_chat_template(messages, **variables)

    def _check_model(self, call: Sampled) -> None:
        if call.model not in (None, self.options.model_name):
            raise RequestError(f"There is no model {call.model!r} here, only {self.options.model_name!r}.")

    async def _answer(
        self, call: Sampled, request: Request, shape: Shape, prompts: list[Any], sampling: SamplingParams
    ) -> Response:
        requests = await run_in_threadpool(self.llm.requests, prompts, sampling)
        if call.stream:
            with_usage = call.stream_options is not None and call.stream_options.include_usage
            states = self._states(requests[0])
            first = await anext(states)  # what is wrong from the start gets a status of its own
            return StreamingResponse(self._events(shape, first, states, with_usage), media_type="text/event-stream")
        outputs = await _while_connected(request, self._all(requests))
        return Response(status_code=CLIENT_LEFT) if outputs is None else JSONResponse(shape.whole(outputs))

    async def _states(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        """The answer as it grows; on the way clients' waits are measured."""
        start = time.perf_counter()
        seen = False
        async with aclosing(self.llm.thread.stream(request)) as states:  # type: ignore[type-var]
            async for state in states:
                if not seen:
                    self.waits.first_token.observe(time.perf_counter() - start)
                    seen = True
                if state.finished:
                    self.waits.request.observe(time.perf_counter() - start)
                yield state

    async def _all(self, requests: list[EngineRequest]) -> list[RequestOutput]:
        """All answers, or the first error: then the others' requests end too, nobody will hear of them."""
        answers = [asyncio.create_task(self._last(request)) for request in requests]
        try:
            return await asyncio.gather(*answers)
        finally:
            for answer in answers:
                answer.cancel()

    async def _last(self, request: EngineRequest) -> RequestOutput:
        return [state async for state in self._states(request)][-1]

    async def _events(
        self, shape: Shape, first: RequestOutput, states: AsyncIterator[RequestOutput], with_usage: bool
    ) -> AsyncIterator[str]:
        """Server-sent events. An error after the first is one of them: the status has been sent."""
        tokens = length = 0
        state = first
        async with aclosing(states):  # type: ignore[type-var]
            try:
                if (opening := shape.first()) is not None:
                    yield _event(opening)
                while True:
                    text = state.outputs[0].text
                    yield _event(shape.piece(text[length:], state, tokens))
                    tokens, length = len(state.outputs[0].token_ids), len(text)
                    if state.finished:
                        break
                    state = await anext(states)
                if with_usage:
                    yield _event(shape.last(state))
                yield "data: [DONE]\n\n"
            except RocmegaError as error:
                log.error("a stream ended: %s", error)
                yield f"data: {bytes(failure(status_of(error), str(error)).body).decode()}\n\n"


def _event(piece: dict[str, Any]) -> str:
    return f"data: {json.dumps(piece, ensure_ascii=False)}\n\n"


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result; None, with the work cancelled, if the client has gone before."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        working.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(llm: LLM, options: Options) -> FastAPI:
    """The ASGI application. The model stays the caller's to close."""
    service = Service(llm, options)
    app = FastAPI(
        title="rocmega",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(key_check(options.api_key))],
    )
    app.add_middleware(BodyLimit, limit=options.max_body_bytes)
    explain_errors(app)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    def metrics() -> Response:  # in a worker thread: it waits for the step that is running
        return Response(generate_latest(service.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": options.model_name, "object": "model", "owned_by": "rocmega", "max_model_len": llm.max_model_len}
        return {"object": "list", "data": [model]}

    @app.post("/v1/completions")
    async def completions(call: CompletionRequest, request: Request) -> Response:
        return await service.complete(call, request)

    @app.post("/v1/chat/completions")
    async def chat(call: ChatRequest, request: Request) -> Response:
        return await service.chat(call, request)

    return app
