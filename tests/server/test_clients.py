"""Many clients, some of which leave: no text is wrong, nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import pytest

from rocmega import SamplingParams
from tests.server.conftest import settled

httpx = pytest.importorskip("httpx")

CLIENTS, CALLS = 16, 3


def body(generator: random.Random) -> dict:
    stem = "the quick brown fox " * 20
    return {
        "prompt": f"{stem[: generator.choice([0, 40, 310])]}w{generator.randint(5, 511)}",
        "max_tokens": generator.randint(1, 12),
        "temperature": generator.choice([0, 0.9]),
        "seed": generator.randint(0, 9),
        "return_token_ids": True,
        "stream": generator.random() < 0.5,
    }


async def call(client, asked: dict) -> list[int]:
    """The answer's tokens."""
    if not asked["stream"]:
        got = await client.post("/v1/completions", json=asked)
        assert got.status_code == 200, got.text
        return got.json()["choices"][0]["token_ids"]
    tokens: list[int] = []
    async with client.stream("POST", "/v1/completions", json=asked) as got:
        assert got.status_code == 200
        async for line in got.aiter_lines():
            if line.startswith("data: {"):
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
    return tokens


async def one_client(address: str, number: int, calls: int) -> list[tuple[dict, list[int] | None]]:
    """What a client asked, and the tokens that came; None where it left before they had."""
    generator, results = random.Random(number), []
    async with httpx.AsyncClient(base_url=address, timeout=1200) as client:  # the CPU target takes its time
        for _ in range(calls):
            asked = body(generator)
            leaves_after = generator.uniform(0, 0.3) if generator.random() < 0.3 else None
            try:
                tokens = await asyncio.wait_for(call(client, asked), leaves_after)
            except asyncio.TimeoutError:
                tokens = None
            results.append((asked, tokens))
    return results


async def all_clients(address: str, clients: int, calls: int, first: int = 0) -> list[tuple[dict, list[int] | None]]:
    """Clients first, first + 1, ... at once."""
    numbers = range(first, first + clients)
    by_client = await asyncio.gather(*(one_client(address, number, calls) for number in numbers))
    return [result for results in by_client for result in results]


def alone(llm, asked: dict) -> list[int]:
    """The answer of a request with the model to itself."""
    fields = {name: asked[name] for name in ("max_tokens", "temperature", "seed")}
    [output] = llm.generate(asked["prompt"], SamplingParams(**fields))
    return output.outputs[0].token_ids


def test_sixteen_clients_with_random_disconnects(address, llm):
    before = Counter(llm.metrics()["finished"])
    results = asyncio.run(all_clients(address, CLIENTS, CALLS))
    assert settled(llm)
    answered = [(asked, tokens) for asked, tokens in results if tokens is not None]
    assert 20 <= len(answered) < len(results) == CLIENTS * CALLS
    finished = Counter(llm.metrics()["finished"]) - before
    assert finished["length"] >= len(answered)
    assert not finished["error"]
    llm.engine.forget_prefixes()
    assert llm.runner.cache.allocator.available == llm.runner.cache.pages
    for asked, tokens in answered[:12]:
        assert len(tokens) == asked["max_tokens"]
        assert tokens == alone(llm, asked)


def test_who_leaves_ends_his_request(address, llm):
    async def leave(stream: bool) -> None:
        asked = {"prompt": "the", "max_tokens": 250, "temperature": 0, "stream": stream, "return_token_ids": True}
        async with httpx.AsyncClient(base_url=address, timeout=300) as client:
            task = asyncio.create_task(call(client, asked))
            while not llm.engine.running:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    for stream in (True, False):
        before = llm.metrics()["finished"].get("abort", 0)
        asyncio.run(leave(stream))
        assert settled(llm)
        assert llm.metrics()["finished"]["abort"] == before + 1
