"""Times of steps: each step alone, from an idle device to its end.

On a GPU `device_ms` is the time between two events around what the arm enqueues, launch gaps included, and `wall_ms`
what the host waits, the launch calls and the wait at the end included. On a CPU both are the host's clock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rocmega.compare.arms import Step

WARM_UP = 3


@dataclass(frozen=True)
class Times:
    """One round of an arm. Milliseconds of each step."""

    device_ms: tuple[float, ...]
    wall_ms: tuple[float, ...]

    @property
    def median(self) -> float:
        return quantile(self.device_ms, 0.5)

    def to_json(self) -> dict[str, Any]:
        return {name: summary(getattr(self, name)) for name in ("device_ms", "wall_ms")}


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, 5th and 95th percentile, extremes, and how many."""
    return {
        "median": quantile(values, 0.5),
        "p5": quantile(values, 0.05),
        "p95": quantile(values, 0.95),
        "min": min(values),
        "max": max(values),
        "steps": len(values),
    }


def quantile(values: Sequence[float], at: float) -> float:
    """Linear between the two neighbours, as numpy does it."""
    ordered = sorted(values)
    place = at * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass
class Timed:
    """What became of an arm. failure: what it raised, if anything; its rounds then stop."""

    rounds: list[Times] = field(default_factory=list)
    failure: Exception | None = None


def alternate(steps: Mapping[str, Step], device: torch.device, count: int, rounds: int) -> dict[str, Timed]:
    """`rounds` rounds of `count` steps of each arm, every other round in reverse order."""
    out, order = {name: Timed() for name in steps}, list(steps)
    for number in range(rounds):
        for name in order if number % 2 == 0 else reversed(order):
            if out[name].failure is None:
                try:
                    out[name].rounds.append(_round(steps[name], device, count))
                except Exception as error:  # the other arms go on
                    out[name].failure = error
    return out


def _round(step: Step, device: torch.device, count: int) -> Times:
    clock = _on_cpu if device.type == "cpu" else _on_gpu
    for _ in range(WARM_UP if device.type != "cpu" else 1):
        clock(step)
    pairs = [clock(step) for _ in range(count)]
    return Times(tuple(device for device, _ in pairs), tuple(wall for _, wall in pairs))


def _on_cpu(step: Step) -> tuple[float, float]:
    start = time.perf_counter()
    step.enqueue()
    wall = (time.perf_counter() - start) * 1e3
    return wall, wall


def _on_gpu(step: Step) -> tuple[float, float]:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start = time.perf_counter()
    begin.record()
    step.enqueue()
    end.record()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - start) * 1e3
    return begin.elapsed_time(end), wall
