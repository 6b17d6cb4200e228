"""Ranks as processes that a test starts and whose ends it looks at."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def start(count: int, *arguments: str, module: str = "tests.parallel.program") -> list[subprocess.Popen[str]]:
    """`count` ranks of one machine, as torchrun would start them, which would end the others when one ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(count):
        variables: dict[str, Any] = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "PYTHONPATH": ROOT, "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env={**os.environ, **{name: str(value) for name, value in variables.items()}},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def ends(started: list[subprocess.Popen[str]], seconds: float) -> tuple[list[tuple[int, str, str]], float]:
    """Each one's exit code, output and errors, and the seconds from the first end to the last.

    seconds: until the first ends, and from there until each other does.
    """
    deadline = time.monotonic() + seconds
    while all(process.poll() is None for process in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    first = time.monotonic()
    ended = [(p.wait(timeout=seconds) if p.poll() is None else p.returncode, *p.communicate()) for p in started]
    return ended, time.monotonic() - first


def end(started: list[subprocess.Popen[str]]) -> None:
    """Whatever they are at."""
    for process in started:
        process.kill()
        process.wait()
