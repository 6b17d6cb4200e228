"""A tiny model behind a real server on a free port of this machine."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from tests.api.test_tokenizer import write_tokenizer

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

TEMPLATE = """{% for m in messages -%}
{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}{{ m.content }} {% endfor %}"""


@pytest.fixture(scope="session")
def speaking(tiny, tmp_path_factory):
    """A tiny checkpoint with a tokenizer and a chat template."""
    directory = shutil.copytree(tiny, tmp_path_factory.mktemp("server") / "tiny")
    write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@contextmanager
def serving(llm, send_buffer: int | None = None, **options):
    """The server's address, as long as the block runs. send_buffer: bytes that the kernel may hold for a client."""
    import uvicorn

    from rocmega.server.app import Options, create_app

    listener = socket.socket()
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections inherit it
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(llm, Options("tiny", **options)), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="session")
def llm(speaking):
    from rocmega import LLM

    with LLM(speaking, path="standard", max_rows=4, max_model_len=256, prefill_chunk=64) as made:
        yield made


@pytest.fixture(scope="session")
def address(llm):
    with serving(llm) as url:
        yield url


def settled(llm, seconds: float = 60) -> bool:
    """Waits until nothing runs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        now = llm.metrics()
        if not now["running"] and not now["waiting"]:
            return now["pages"]["held"] == 0
        time.sleep(0.02)
    return False
