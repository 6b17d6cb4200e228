"""Two GPUs of one host: the demo, and a rank that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

DEMO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rocmega.demo"]


def test_the_demo_on_two_gpus():
    done = subprocess.run([*DEMO, "--json", "--tokens", "64"], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    print(json.dumps(report))
    assert report["agree"] is True
    assert report["launches_per_token"] == 1


def test_a_killed_rank_ends_the_other_with_an_error():
    started = subprocess.Popen(
        [*DEMO, "--tokens", "1000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        [victim] = wait_for_decoding(started)
        os.kill(victim, signal.SIGKILL)
        begin = time.monotonic()
        out, errors = started.communicate(timeout=60)
        assert started.returncode != 0
        assert time.monotonic() - begin < 20  # torchrun looks after its processes every few seconds
        assert "All agree" not in out
        assert "for rank 1 and tag" in errors or "cannot be reached" in errors, errors
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)


def wait_for_decoding(started: subprocess.Popen[str]) -> list[int]:
    """The process id of rank 1, once rank 0 says that it decodes."""
    assert started.stderr is not None
    for line in started.stderr:
        if "mega on 2 ranks: decoding" in line:
            time.sleep(1)
            break
    children = subprocess.run(["pgrep", "-P", str(started.pid)], capture_output=True, text=True, check=True)
    environments = {int(pid): Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in children.stdout.split()}
    return [pid for pid, variables in environments.items() if "RANK=1" in variables]
