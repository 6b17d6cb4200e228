"""Numbers for Prometheus: what the engine counts, and what clients wait for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from rocmega.llm import LLM


class Waits:
    """What clients wait for, in seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.first_token = Histogram(
            "rocmega_time_to_first_token_seconds", "From the request to its first token.", registry=registry
        )
        self.request = Histogram("rocmega_request_seconds", "From the request to its end.", registry=registry)


class EngineMetrics(Collector):
    """LLM.metrics(), read when Prometheus asks."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def collect(self) -> Iterable[Metric]:
        """As prometheus_client wants it."""
        now = self.llm.metrics()
        for name, text in (
            ("prompt_tokens", "Tokens of prompts."),
            ("reused_tokens", "Tokens of prompts that were in the cache."),
            ("preemptions", "Times that a request had to give its pages back."),
            ("prefill_seconds", "Time spent on prompts."),
            ("decode_seconds", "Time spent on decode steps."),
        ):
            yield CounterMetricFamily(f"rocmega_{name}", text, value=now[name])
        for name, label, text in (
            ("tokens", "path", "Tokens generated, by the path that did."),
            ("steps", "path", "Decode steps, by the path that ran them."),
            ("fallback_reasons", "reason", "Steps that the mega-task could not run, by reason."),
            ("single_step_reasons", "reason", "Steps that were single though more are allowed in a launch, by reason."),
            ("finished", "how", "Requests that have ended, by how."),
        ):
            counter = CounterMetricFamily(f"rocmega_{name}", text, labels=[label])
            for value, count in now[name].items():
                counter.add_metric([value], count)
            yield counter
        yield GaugeMetricFamily("rocmega_running", "Requests that have a row.", value=now["running"])
        yield GaugeMetricFamily("rocmega_waiting", "Requests that wait for a row.", value=now["waiting"])
        pages = GaugeMetricFamily("rocmega_cache_pages", "Pages of the cache, by use.", labels=["use"])
        for use, count in now["pages"].items():
            pages.add_metric([use], count)
        yield pages
