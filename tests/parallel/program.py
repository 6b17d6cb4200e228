"""One rank as a process of its own: what the tests of several processes start."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time

import numpy as np
import torch

from rocmega import LLM, SamplingParams
from rocmega.drivers.base import Driver
from rocmega.drivers.host import HostDriver
from rocmega.drivers.select import pick
from rocmega.errors import DriverError, RocmegaError
from rocmega.parallel import TorchGroup, local_rank
from tests.parallel.chain import SPAN, RankChain, reference

WAIT_SECONDS = 2.0


def misbehave(how: str, driver: Driver) -> None:
    """What rank 1 does before its third step."""
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stall":
        time.sleep(8)
    if how == "raise":
        raise DriverError("the device fell off the bus")


def borders() -> None:
    """Two nodes of one rank: eight tensors go over the border and one comes back, then the first node dies."""
    group = TorchGroup(1, nodes=2, setup_seconds=30)
    assert group.pipeline is not None
    for step in range(9):
        if step == 8 and group.node == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.arange(6.0) + step if group.node == 0 else torch.empty(6)
        if group.node == 0:
            group.pipeline.send(x)
        else:
            group.pipeline.receive(x)
        assert torch.equal(x, torch.arange(6.0) + step)
        answer = group.pipeline.from_last(torch.tensor([10 * step if group.node == 1 else -1]))
        assert answer.item() == 10 * step


def launches(checkpoint: str, device: str, *, dies: bool = False) -> None:
    """Answers of a tiny model on two ranks, many tokens a launch, one of which is ended early; prints what came.

    A rank that dies does so early in the first of several launches: on a GPU that one may still run to its end.
    """
    length = 128 if device == "host" else 1024
    settings = {"path": "mega", "device": device, "blocks": 2, "max_rows": 2, "max_model_len": length}
    with LLM(checkpoint, tensor_parallel_size=2, tokens_per_launch="auto", **settings) as llm:
        stream = llm.stream([3, 1, 4], SamplingParams(max_tokens=length - 3, ignore_eos=True))
        first = [next(stream) for _ in range(3)][-1]
        if dies and int(os.environ["RANK"]) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if dies:
            list(stream)
        stream.close()
        greedy = [SamplingParams(max_tokens=count) for count in (5, 3, 3)]  # the third joins when the second has ended
        answers = [first, *llm.generate([[3, 1, 4], [9], [8, 8]], greedy)]
        answers += llm.generate([3, 1, 4], SamplingParams(max_tokens=3, temperature=1.0, seed=4))
        metrics = llm.metrics()
    tokens = [output.outputs[0].token_ids for output in answers]
    wanted = ("launches_of_several_steps", "single_step_reasons", "tokens")
    print(json.dumps({"answers": tokens, **{name: metrics[name] for name in wanted}}), flush=True)


def main(how: str, device: str = "host", what: str = "30") -> None:
    """device: host, or auto for a GPU of each rank's own. what: how many steps, or which checkpoint."""
    if how == "borders":
        return borders()
    if how in ("launches", "lost launch"):
        return launches(what, device, dies=how == "lost launch")
    group = TorchGroup(int(os.environ["WORLD_SIZE"]), wait_seconds=WAIT_SECONDS, setup_seconds=30)
    driver = HostDriver(seed=group.rank) if device == "host" else pick(device, index=local_rank())
    if how == "refuse" and group.rank == 1:
        driver.shared = lambda *args, **kwargs: (_ for _ in ()).throw(DriverError("no memory for peers here"))
    chain = group.agree("make the chain", lambda: RankChain(group, driver))
    delays, seen = random.Random(group.rank), hashlib.sha256()
    for step in range(int(what)):
        if how == "delays" and step % 3 == 0:
            time.sleep(delays.random() / 50)
        if step == 2 and group.rank == 1:
            misbehave(how, driver)
        x, expected = chain.step(), reference(group.size, 1 + step * SPAN)
        if np.abs(x.view(np.float32) - expected).max() > 1e-5 * np.abs(expected).max():  # sums of 40 products in f32
            raise RocmegaError(f"step {step} of rank {group.rank} is wrong")
        seen.update(x.tobytes())
    chain.close()
    group.close()
    print("bits", seen.hexdigest(), flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except RocmegaError as error:
        print(type(error).__name__, error, file=sys.stderr, flush=True)
        sys.exit(2)
