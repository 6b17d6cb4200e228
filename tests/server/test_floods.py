"""More than the server can do, and clients that take nothing: others are answered, nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from http.client import HTTPResponse

import pytest

from rocmega import SamplingParams
from tests.server.conftest import serving, settled

httpx = pytest.importorskip("httpx")

CALLS, PROMPTS = 40, 64  # 2,560 requests
WAITING = 100


async def at_once(address: str, bodies: list[dict]) -> list:
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:
        return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))


def test_thousands_at_once_are_answered_or_told_to_come_back(address, llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "max_waiting", WAITING)
    body = {"prompt": [[1, 2 + at] for at in range(PROMPTS)], "max_tokens": 1, "temperature": 0}
    got = asyncio.run(at_once(address, [body] * CALLS))
    statuses = Counter(answer.status_code for answer in got)
    assert set(statuses) == {200, 429}
    assert all(answer.headers["retry-after"] == "1" for answer in got if answer.status_code == 429)
    assert len({json.dumps([choice["text"] for choice in a.json()["choices"]]) for a in got if a.is_success}) == 1
    assert settled(llm)
    assert httpx.post(f"{address}/v1/completions", json={"prompt": "fox"}, timeout=120).status_code == 200


def test_of_a_call_that_is_told_to_come_back_nothing_goes_on(address, llm, monkeypatch):
    """Some of its prompts had been taken already."""
    monkeypatch.setattr(llm.engine, "max_waiting", 8)
    before = Counter(llm.metrics()["finished"])
    body = {"prompt": [[1, 2]] * PROMPTS, "max_tokens": 200}
    assert httpx.post(f"{address}/v1/completions", json=body, timeout=120).status_code == 429
    assert settled(llm)
    finished = Counter(llm.metrics()["finished"]) - before
    assert set(finished) == {"abort"}
    assert 8 <= finished["abort"] < PROMPTS


def streaming(address: str, body: dict) -> socket.socket:
    """A connection that has asked, whose side takes two kilobytes until somebody reads."""
    host, port = address.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.settimeout(120)
    client.connect((host, int(port)))
    content = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return client


def test_who_never_reads_holds_up_nobody_and_loses_nothing(llm):
    tokens = 120  # with their alternatives some 110 KB, of which server and kernel hold about 80 for a client
    body = {"prompt": "the fox", "max_tokens": tokens, "temperature": 0, "logprobs": 20, "return_token_ids": True}
    with serving(llm, send_buffer=4096) as address:
        stuck = [streaming(address, body) for _ in range(llm.runner.max_rows)]
        other = httpx.post(f"{address}/v1/completions", json={"prompt": "quick", "max_tokens": 3}, timeout=120)
        assert other.status_code == 200
        assert settled(llm)  # their answers are complete, their rows and pages free
        events = [read(client) for client in stuck]
    [expected] = llm.generate("the fox", SamplingParams(max_tokens=tokens))
    for pieces in events:
        assert [token for piece in pieces for token in piece["token_ids"]] == expected.outputs[0].token_ids
        assert len(pieces) < tokens  # nobody kept the states that they did not fetch: their tokens came together


def read(client: socket.socket) -> list[dict]:
    """The choices of a stream's events."""
    with client, HTTPResponse(client) as response:
        response.begin()
        assert response.status == 200
        *lines, last = [line for line in response.read().decode().splitlines() if line]
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
