"""Sixteen clients, random disconnects, for as long as you like: no page leaks, no text is wrong, all is accounted for.

    python -m tests.server.soak --minutes 10

Prints one JSON object; exit code 1 if something was wrong. On the mega path every answer is compared, bit for bit, with
the one of a request that runs alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rocmega import LLM
from rocmega.models.glm.presets import write_checkpoint
from tests.api.test_tokenizer import write_tokenizer
from tests.server.conftest import serving, settled
from tests.server.test_clients import all_clients, alone


def soak(llm: LLM, minutes: float, clients: int) -> dict:
    """Rounds of all clients until the time is up; every seventh answer is asked for again, alone."""
    calls, wrong, finished = Counter(), [], Counter(llm.metrics()["finished"])
    end, first = time.monotonic() + minutes * 60, 0
    with serving(llm) as address:
        while time.monotonic() < end:
            for number, (asked, tokens) in enumerate(asyncio.run(all_clients(address, clients, 5, first))):
                calls["left" if tokens is None else "answered"] += 1
                if tokens is not None and number % 7 == 0 and alone(llm, asked) != tokens:
                    wrong.append(asked)
            first += clients
        quiet = settled(llm)
    llm.engine.forget_prefixes()
    allocator = llm.runner.cache.allocator
    ended = Counter(llm.metrics()["finished"]) - finished
    leaked = allocator.pages - allocator.available
    return {"calls": calls, "finished": ended, "wrong": wrong, "quiet": quiet, "leaked_pages": leaked}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--path", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens-per-launch", default="1", help="a number, or auto")
    options = parser.parse_args()
    launch = options.tokens_per_launch
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint("glm-5.2-tiny", Path(folder) / "tiny")
        write_tokenizer(checkpoint)
        # Too few pages for all rows at once, so that some requests have to give theirs back.
        with LLM(checkpoint, path=options.path, device=options.device, max_rows=8, max_model_len=256, cache_pages=7,
                 prefill_chunk=64, tokens_per_launch=int(launch) if launch.isdecimal() else launch) as llm:  # fmt: skip
            result = soak(llm, options.minutes, options.clients)
            result["preemptions"] = llm.metrics()["preemptions"]
            result["mega_coverage"] = llm.metrics()["mega_coverage"]
            result["launches_of_several_steps"] = llm.metrics()["launches_of_several_steps"]
    print(json.dumps(result, indent=2))
    return int(bool(result["wrong"] or result["leaked_pages"] or not result["quiet"] or result["finished"]["error"]))


if __name__ == "__main__":
    sys.exit(main())
