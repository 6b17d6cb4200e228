"""The mega-task behind the public API, and what happens where it cannot run."""

import pytest

from rocmega import LLM, SamplingParams
from rocmega.errors import RequestError, ToolchainError

PROMPTS = [[3, 1, 4], [9], list(range(70))]
SAMPLING = SamplingParams(max_tokens=3)


def generate(checkpoint, prompts=PROMPTS, **settings):
    with LLM(checkpoint, max_rows=3, max_model_len=128, **settings) as llm:
        tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, SAMPLING)]
        return tokens, llm.metrics()


@pytest.fixture(scope="module")
def standard(tiny):
    return generate(tiny, path="standard")[0]


@pytest.mark.parametrize("settings", [{"path": "mega"}, {"path": "auto"}, {"blocks": 3, "seed": 7}])
def test_the_mega_task_gives_the_same_tokens(tiny, standard, settings):
    tokens, metrics = generate(tiny, device="host", **settings)
    assert tokens == standard
    assert metrics["steps"] == {"mega": 3, "fused": 0, "standard": 0}
    assert metrics["mega_coverage"] == 1
    assert metrics["fallback_reasons"] == {}


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("ROCMEGA_HOSTCXX", "/nowhere/c++")
    monkeypatch.setenv("ROCMEGA_CACHE", str(tmp_path))


def test_without_a_compiler_auto_falls_back_and_says_why(tiny, standard, no_compiler):
    tokens, metrics = generate(tiny, device="host")
    assert tokens == standard
    assert metrics["steps"] == {"mega": 0, "fused": 0, "standard": 3}
    [(reason, steps)] = metrics["fallback_reasons"].items()
    assert "/nowhere/c++" in reason
    assert steps == 3


def test_without_a_compiler_mega_is_an_error(tiny, no_compiler):
    with pytest.raises(ToolchainError, match="/nowhere/c"):
        generate(tiny, device="host", path="mega")


def test_mega_refuses_with_every_reason_instead_of_falling_back(tiny, monkeypatch):
    with LLM(tiny, path="mega", device="host", max_rows=3, max_model_len=128) as llm:
        monkeypatch.setattr("rocmega.policy.MEGA_ROWS", 1)
        monkeypatch.setattr("rocmega.policy.MEGA_FEATURES", frozenset())
        with pytest.raises(RequestError, match="does not do: greedy; 3 rows"):
            llm.generate(PROMPTS, SAMPLING)


def test_a_step_that_cannot_be_mega_leaves_the_others_alone(tiny, standard, monkeypatch):
    """Three rows on the standard path, then fewer by the mega-task: both write the same cache."""
    monkeypatch.setattr("rocmega.policy.MEGA_ROWS", 2)
    with LLM(tiny, device="host", max_rows=3, max_model_len=128) as llm:
        sampling = [SAMPLING, SamplingParams(max_tokens=1), SAMPLING]
        outputs = llm.generate(PROMPTS, sampling)
        assert llm.metrics()["steps"] == {"mega": 2, "fused": 0, "standard": 1}
    assert [output.outputs[0].token_ids for output in outputs] == [standard[0], standard[1][:1], standard[2]]
