"""The public API on DeepSeek checkpoints: it runs, by the mega-task where that can, and says so where it cannot."""

from __future__ import annotations

import pytest

from rocmega import LLM, SamplingParams
from rocmega.errors import ConfigError, RequestError
from rocmega.packing import pack_checkpoint
from tests.models.deepseek.conftest import FAMILIES

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_continued_by_the_mega_task(name, tiny_checkpoint, oracle, prompt):
    directory = tiny_checkpoint(name)
    with LLM(directory, device="host", max_model_len=128, max_rows=2, blocks=3) as llm:
        results = llm.generate([prompt.tolist(), prompt.tolist()[:9]], GREEDY)
        metrics = llm.metrics()
    assert results[0].outputs[0].token_ids == oracle(name)[0][:6]
    assert len(results[1].outputs[0].token_ids) == 6
    assert metrics["mega_coverage"] == 1


def test_draws_are_the_same_by_both_paths(tiny_checkpoint):
    drawn = SamplingParams(max_tokens=5, temperature=0.8, top_k=20, presence_penalty=0.5, seed=3, ignore_eos=True)
    answers = []
    for path, options in (("mega", {"blocks": 3}), ("standard", {})):
        directory = tiny_checkpoint("deepseek-v4-flash-tiny")
        with LLM(directory, device="host", path=path, max_model_len=128, max_rows=2, **options) as llm:
            answers.append([each.outputs[0].token_ids for each in llm.generate([[1, 2, 3], [4] * 9], drawn)])
    assert answers[0] == answers[1]


OTHER_CACHE = {"device": "host", "max_model_len": 64, "max_rows": 1, "kv_cache_dtype": "published"}


def test_what_the_mega_task_cannot_do_falls_back_and_says_why(tiny_checkpoint):
    with LLM(tiny_checkpoint("deepseek-v4-flash-tiny"), **OTHER_CACHE) as llm:
        llm.generate([[1, 2, 3]], GREEDY)
        metrics = llm.metrics()
    assert metrics["mega_coverage"] == 0
    assert any("holds f32 values, not published ones" in reason for reason in metrics["fallback_reasons"])


def test_nothing_falls_back_in_silence(tiny_checkpoint):
    with pytest.raises(ConfigError, match="its cache holds f32 values, not published ones"):
        LLM(tiny_checkpoint("deepseek-v4-flash-tiny"), path="mega", **OTHER_CACHE)


def test_requests_that_wait_get_state_in_turn(tiny_checkpoint, prompt):
    """More requests than rows, in a cache too small for them all: each gives what it gives alone."""
    directory = tiny_checkpoint("deepseek-v4-flash-tiny")
    prompts = [prompt.tolist()[start : start + 60] for start in (0, 5, 10)]
    options = {"device": "host", "path": "standard", "max_model_len": 128}
    with LLM(directory, max_rows=1, **options) as llm:
        alone = [llm.generate([each], GREEDY)[0].outputs[0].token_ids for each in prompts]
    with LLM(directory, max_rows=3, cache_pages=3, **options) as llm:  # each needs a second page within its answer
        together = llm.generate([*prompts, *prompts], GREEDY)
        assert llm.metrics()["preemptions"] > 0
    assert [each.outputs[0].token_ids for each in together] == alone * 2


@pytest.mark.parametrize("name", FAMILIES)
def test_published_caches_are_a_choice(name, tiny_checkpoint, prompt):
    options = {"device": "host", "path": "standard", "max_model_len": 128, "max_rows": 1}
    with LLM(tiny_checkpoint(name), kv_cache_dtype="published", **options) as llm:
        assert {str(pool.dtype) for pool in llm.runner.cache.pools.values()} >= {"torch.uint8"}
        assert len(llm.generate([prompt.tolist()], GREEDY)[0].outputs[0].token_ids) == 6
    with pytest.raises(
        RequestError, match="kv_cache_dtype='int3': this model's cache knows auto, f32, bf16, published"
    ):
        LLM(tiny_checkpoint(name), kv_cache_dtype="int3", **options)


def test_guesses_are_refused(tiny_checkpoint):
    with pytest.raises(RequestError, match="draft_tokens=2: this model keeps state"):
        LLM(tiny_checkpoint("deepseek-v4-flash-tiny"), device="host", path="standard", max_model_len=64, draft_tokens=2)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_pack_runs(name, tiny_checkpoint, tmp_path):
    directory = tiny_checkpoint(name, "mxfp4")
    pack_checkpoint(directory, tmp_path, arch="host")
    answers = []
    for path in (directory, tmp_path):
        with LLM(path, device="host", path="standard", max_model_len=64, max_rows=1) as llm:
            answers.append(llm.generate([[1, 2, 3, 4, 5]], GREEDY)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]
