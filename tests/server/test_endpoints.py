"""The endpoints by OpenAI's own client, and what they refuse."""

from __future__ import annotations

import json

import pytest

from rocmega import SamplingParams
from tests.server.conftest import serving, settled

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def http(address):
    with httpx.Client(base_url=address, timeout=120) as made:
        yield made


def answer(llm, prompt, **fields):
    return llm.generate(prompt, SamplingParams(**fields))[0].outputs[0]


def test_a_completion(client, llm):
    got = client.completions.create(model="tiny", prompt="the quick fox", max_tokens=6, temperature=0)
    expected = answer(llm, "the quick fox", max_tokens=6)
    assert got.choices[0].text == expected.text
    assert got.choices[0].finish_reason == "length"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (3, 6, 9)


def test_every_kind_of_prompt(client, llm):
    for prompt in ("the fox", ["the fox", "quick"], [1, 4], [[1, 4], [2]]):
        got = client.completions.create(model="tiny", prompt=prompt, max_tokens=3, temperature=0)
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        expected = [answer(llm, one, max_tokens=3).text for one in (prompt if several else [prompt])]
        assert [choice.text for choice in got.choices] == expected
        assert [choice.index for choice in got.choices] == list(range(len(expected)))


def test_a_chat_whole_and_streamed(client, llm):
    asked = {
        "model": "tiny", "messages": [{"role": "user", "content": "the quick"}, {"role": "user", "content": "fox"}],
        "max_tokens": 8, "temperature": 0.8, "seed": 7, "extra_body": {"top_k": 40},
    }  # fmt: skip
    expected = answer(llm, "the quick fox", max_tokens=8, temperature=0.8, seed=7, top_k=40)
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected.text
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1]) == expected.text
    assert [piece.choices[0].finish_reason for piece in pieces[-2:-1]] == ["length"]
    assert pieces[-1].usage.completion_tokens == 8
    assert len({piece.id for piece in pieces}) == 1


def test_without_a_number_a_chat_may_fill_the_context(client, llm):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "fox " * (llm.max_model_len - 9)}]}
    assert client.chat.completions.create(**asked).usage.total_tokens == llm.max_model_len


def test_a_streamed_completion_with_logprobs_and_a_stop_text(client, llm):
    words = answer(llm, "quick", max_tokens=8).text.split()
    asked = {"model": "tiny", "prompt": "quick", "max_tokens": 8, "temperature": 0, "logprobs": 2}
    pieces = list(client.completions.create(**asked, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces).split() == words
    tokens = [token for piece in pieces for token in piece.choices[0].logprobs.tokens]
    assert tokens == words
    assert all(value <= 0 for piece in pieces for value in piece.choices[0].logprobs.token_logprobs)
    at = next(at for at in range(2, 8) if words[at] not in words[:at])
    stopped = client.completions.create(**asked, stop=[words[at]])
    assert stopped.choices[0].text.split() == words[:at]
    assert stopped.choices[0].finish_reason == "stop"


def test_chat_logprobs(client):
    got = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "fox"}], max_tokens=2, logprobs=True, top_logprobs=3
    )
    entries = got.choices[0].logprobs.content
    assert len(entries) == 2
    assert all(len(entry.top_logprobs) in (3, 4) and entry.logprob <= 0 for entry in entries)


def test_token_ids_on_request(http, llm):
    body = {"prompt": [1, 2], "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    got = http.post("/v1/completions", json=body).json()
    assert got["choices"][0]["token_ids"] == answer(llm, [1, 2], max_tokens=3).token_ids
    assert got["mega_coverage"] == [0.0]


def test_models_health_and_metrics(client, http):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert http.get("/health").json() == {"status": "ok"}
    client.completions.create(model="tiny", prompt="fox", max_tokens=3)
    text = http.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['rocmega_tokens_total{path="standard"}']) >= 3
    assert float(lines["rocmega_time_to_first_token_seconds_count"]) >= 1
    assert float(lines["rocmega_running"]) == 0
    assert float(lines['rocmega_cache_pages{use="total"}']) == 16


def chat(content, role: str = "user", **fields):
    return {"messages": [{"role": role, "content": content}], **fields}


REFUSED = {
    "no prompt": ("completions", {}, "prompt"),
    "empty prompt": ("completions", {"prompt": []}, "no prompt"),
    "empty text": ("completions", {"prompt": ""}, "empty"),
    "no temperature": ("completions", {"prompt": "fox", "temperature": -1}, "temperature=-1"),
    "unknown token": ("completions", {"prompt": [512]}, "holds token 512"),
    "too long": ("completions", {"prompt": [1] * 300}, "max_model_len"),
    "too many tokens asked for": ("completions", {"prompt": "fox", "max_tokens": 300}, "max_model_len"),
    "no tokens asked for": ("completions", {"prompt": "fox", "max_tokens": 0}, "max_tokens=0"),
    "impossible top_p": ("completions", {"prompt": "fox", "top_p": 2}, "top_p=2"),
    "unknown stop id": ("completions", {"prompt": "fox", "stop_token_ids": [9999]}, "9999"),
    "several answers": ("completions", {"prompt": "fox", "n": 2}, "n: "),
    "a field nobody knows": ("completions", {"prompt": "fox", "grammar": "x"}, "grammar"),
    "another model": ("completions", {"prompt": "fox", "model": "gpt"}, "no model 'gpt'"),
    "a stream of several": ("completions", {"prompt": ["a", "b"], "stream": True}, "one prompt in a stream"),
    "no messages": ("chat/completions", {"messages": []}, "messages"),
    "a role the template refuses": ("chat/completions", chat("x", role="bad"), "no such role"),
    "pictures": ("chat/completions", chat([{"type": "image_url"}]), "content"),
    "top_logprobs alone": ("chat/completions", chat("x", top_logprobs=2), "logprobs=true"),
    "the template's own": ("chat/completions", chat("x", chat_template_kwargs={"messages": []}), "not set messages"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_requests_are_explained(name, http, llm):
    endpoint, body, message = REFUSED[name]
    got = http.post(f"/v1/{endpoint}", json=body)
    assert got.status_code == 400
    error = got.json()["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in got.text
    assert settled(llm)


def test_what_is_no_json_or_nowhere(http):
    assert http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"}).status_code == 400
    assert http.get("/v1/nothing").status_code == 404
    assert http.get("/docs").status_code == 404
    assert http.get("/v1/completions").status_code == 405


def test_a_bug_is_no_traceback_to_the_client_and_the_server_goes_on(http, llm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(llm.runner.standard, "decode", lambda batch: 1 / 0)
        got = http.post("/v1/completions", json={"prompt": "fox"})
        assert got.status_code == 500
        assert "ZeroDivisionError" in got.json()["error"]["message"]
        assert 'File "' not in got.text
        patch.setattr(llm, "requests", lambda *args: 1 / 0)
        got = http.post("/v1/completions", json={"prompt": "fox"})
        assert got.json()["error"]["message"] == "Something went wrong in the server; its log says what."
    assert http.post("/v1/completions", json={"prompt": "fox"}).status_code == 200


def test_an_error_in_the_middle_of_a_stream_is_an_event(http, llm, monkeypatch):
    decode, calls = llm.runner.standard.decode, []

    def third_time(batch):
        calls.append(1)
        return decode(batch) if len(calls) < 3 else 1 / 0

    monkeypatch.setattr(llm.runner.standard, "decode", third_time)
    got = http.post("/v1/completions", json={"prompt": "fox", "stream": True})
    events = [line.removeprefix("data: ") for line in got.text.splitlines() if line]
    assert "ZeroDivisionError" in json.loads(events[-1])["error"]["message"]


@pytest.fixture(scope="module")
def guarded(llm):
    with serving(llm, api_key="secret", max_body_bytes=2000) as url, httpx.Client(base_url=url, timeout=120) as made:
        yield made


def test_the_key_is_asked_for(guarded):
    body = {"prompt": "fox", "max_tokens": 1}
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
        got = guarded.post("/v1/completions", json=body, headers=headers)
        assert got.status_code == 401
        assert got.headers["www-authenticate"] == "Bearer"
    assert guarded.get("/metrics").status_code == 401
    assert guarded.get("/health").status_code == 200
    assert guarded.post("/v1/completions", json=body, headers={"authorization": "Bearer secret"}).status_code == 200


def test_bodies_are_bounded_announced_or_not(guarded):
    headers = {"authorization": "Bearer secret", "content-type": "application/json"}
    big = json.dumps({"prompt": "x" * 3000}).encode()
    assert guarded.post("/v1/completions", content=big, headers=headers).status_code == 413
    assert guarded.post("/v1/completions", content=iter([big[:1500], big[1500:]]), headers=headers).status_code == 413


def test_too_many_at_once_are_told_to_come_back(http, llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "max_waiting", 0)
    got = http.post("/v1/completions", json={"prompt": "fox"})
    assert got.status_code == 429
    assert got.headers["retry-after"] == "1"
