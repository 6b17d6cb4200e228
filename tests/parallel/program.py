"""One rank as a process of its own: what the tests of several processes start."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time

import numpy as np

from rocmega.drivers.host import HostDriver
from rocmega.errors import DriverError, RocmegaError
from rocmega.parallel import TorchGroup
from tests.parallel.chain import RankChain

WAIT_SECONDS = 2.0


def misbehave(how: str, driver: HostDriver) -> None:
    """What rank 1 does before its third step."""
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stall":
        time.sleep(8)
    if how == "raise":
        raise DriverError("the device fell off the bus")


def main(how: str) -> None:
    group = TorchGroup(int(os.environ["WORLD_SIZE"]), wait_seconds=WAIT_SECONDS, setup_seconds=30)
    driver = HostDriver(seed=group.rank)
    if how == "refuse" and group.rank == 1:
        driver.shared = lambda *args, **kwargs: (_ for _ in ()).throw(DriverError("no memory for peers here"))
    chain = group.agree("make the chain", lambda: RankChain(group, driver))
    delays, seen = random.Random(group.rank), []
    for step in range(30):
        if how == "delays" and step % 3 == 0:
            time.sleep(delays.random() / 50)
        if step == 2 and group.rank == 1:
            misbehave(how, driver)
        seen.append(chain.step())
    same = hashlib.sha256(np.stack(seen).tobytes()).hexdigest()
    chain.close()
    group.close()
    print("bits", same, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except RocmegaError as error:
        print(type(error).__name__, error, file=sys.stderr, flush=True)
        sys.exit(2)
