"""`rocmega serve` told to end: what has begun may go on for a while, and no client can make that longer."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx")

START = "from rocmega.cli import main; main()"


@contextlib.contextmanager
def server(directory: Path, seconds: int) -> Iterator[tuple[subprocess.Popen, str]]:
    """A process that serves, and its address."""
    arguments = [
        "serve", directory, "--port", "0", "--path", "standard", "--device", "host",
        "--max-rows", "1", "--max-model-len", "1024", "--shutdown-seconds", str(seconds),
    ]  # fmt: skip
    command = [sys.executable, "-c", START, *map(str, arguments)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"})
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"running on (http://\S+)", line):
                break
        else:
            raise AssertionError("the server has not begun")
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("tokens", "seconds", "whole"), [(800, 1, False), (100, 60, True)])
def test_what_has_begun_goes_on_for_so_long(speaking, tokens, seconds, whole):
    body = {"prompt": [[1, 2, 3]], "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    with server(speaking, seconds) as (process, address):
        events = []
        asked = httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60)
        with contextlib.suppress(httpx.RemoteProtocolError), asked as got:
            for line in got.iter_lines():
                if not events:
                    process.terminate()
                events.append(line)
        process.wait(timeout=60)
    assert ("data: [DONE]" in events) == whole
    assert process.returncode in (0, -signal.SIGTERM)
