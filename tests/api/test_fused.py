"""The fused path as a fallback: when it runs, and that requests do not notice. Its kernels are tests/fused's work."""

from __future__ import annotations

import pytest

from rocmega import LLM, SamplingParams
from rocmega.errors import ConfigError, RequestError
from rocmega.models.glm.standard import StandardPath
from rocmega.policy import Measured
from rocmega.tuning import measure

PROMPTS = [[3, 1, 4], [9], list(range(70))]
SETTINGS = {"device": "host", "max_rows": 3, "max_model_len": 128}
TOKENS = SamplingParams(max_tokens=3)


class StandIn:
    """In place of Triton's kernels the standard path's arithmetic, over the same cache."""

    def __init__(self, module, config, weights, cache, max_model_len):
        self.path, self.steps = StandardPath(config, weights, cache), 0

    def decode(self, batch):
        self.steps += 1
        return self.path.decode(batch)


@pytest.fixture(autouse=True)
def loadable(monkeypatch):
    monkeypatch.setattr("rocmega.policy.FUSED_TARGETS", frozenset({"host"}))
    monkeypatch.setattr("rocmega.fused.steps.FusedSteps", StandIn)


@pytest.fixture(scope="module")
def wanted(tiny):
    with LLM(tiny, path="standard", **SETTINGS) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, TOKENS)]


def generate(llm, sampling=TOKENS):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, sampling)]


def test_asked_for_by_name(tiny, wanted):
    with LLM(tiny, path="fused", **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, TOKENS)
        assert [output.outputs[0].token_ids for output in outputs] == wanted
        assert [output.tokens_by_path for output in outputs] == [{"fused": 3}] * 3
        metrics = llm.metrics()
    assert metrics["steps"] == {"mega": 0, "fused": 3, "standard": 0}
    assert metrics["coverage"] == {"mega": 0, "fused": 1, "standard": 0}
    assert (metrics["mega_coverage"], metrics["fallback_reasons"]) == (0, {})


def test_what_the_mega_task_cannot_run_is_its(tiny, wanted, monkeypatch):
    """Within one request: three rows by the fused path, then fewer by the mega-task, on one cache."""
    monkeypatch.setattr("rocmega.policy.MEGA_RULES", (lambda s: f"{s.rows} rows" if s.rows > 2 else None,))
    with LLM(tiny, **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, [TOKENS, SamplingParams(max_tokens=1), TOKENS])
        metrics = llm.metrics()
    assert metrics["steps"] == {"mega": 2, "fused": 1, "standard": 0}
    assert metrics["fallback_reasons"] == {"3 rows": 1}
    assert outputs[0].tokens_by_path == {"fused": 1, "mega": 2}
    assert [output.outputs[0].token_ids for output in outputs] == [wanted[0], wanted[1][:1], wanted[2]]


def test_auto_takes_what_was_measured_to_be_the_fastest(tiny, wanted, monkeypatch):
    cells = [Measured(1, 128, 3.0, 2.0, 1.0), Measured(3, 128, 3.0, 1.0, 2.0)]
    monkeypatch.setattr("rocmega.tuning.load", lambda runner: tuple(cells))
    with LLM(tiny, **SETTINGS) as llm:
        llm.generate(PROMPTS, [SamplingParams(max_tokens=1), SamplingParams(max_tokens=1), TOKENS])
        metrics = llm.metrics()
    assert metrics["steps"] == {"mega": 0, "fused": 2, "standard": 1}
    assert sorted(reason.split(": ")[1] for reason in metrics["fallback_reasons"]) == [
        "3 ms, and 1 ms by the fused path",
        "3 ms, and 1 ms by the standard path",
    ]


def test_measurements_are_of_all_paths(tiny):
    with LLM(tiny, **SETTINGS) as llm:
        assert llm.runner.paths == ("mega", "fused", "standard")
        [cell] = measure(llm.runner, [2], [30])
    assert min(cell.mega_ms, cell.fused_ms, cell.standard_ms) > 0


def test_what_it_lacks_is_a_reason(tiny, monkeypatch):
    def fail(*_, **__):
        raise ConfigError("Triton is not installed")

    monkeypatch.setattr("rocmega.fused.steps.FusedSteps", fail)
    with LLM(tiny, path="fused", **SETTINGS) as llm, pytest.raises(RequestError, match=r"fused path cannot.*Triton is"):
        generate(llm)


def test_a_path_that_was_not_loaded_is_refused(tiny):
    for asked, other in (("standard", "mega"), ("mega", "fused")):
        with LLM(tiny, path=asked, **SETTINGS) as llm:
            llm.engine.path = other
            with pytest.raises(RequestError, match="it has not been loaded"):
                generate(llm)
