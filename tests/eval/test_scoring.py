"""Scores of given tokens are what generating says of them."""

from __future__ import annotations

import pytest
import torch

from rocmega import LLM, SamplingParams
from rocmega.errors import RequestError
from rocmega.eval.scoring import score
from rocmega.models.glm.training import SHIPPED

PROMPTS = ("sort banana=", "add 12+30=", "copy mega=", "reverse abc=", "count a abcda=")


@pytest.fixture(scope="module", params=["standard", "mega"])
def llm(request):
    with LLM(SHIPPED, path=request.param, device="host", max_rows=2, max_model_len=64) as made:
        yield made


def test_what_was_generated_scores_as_it_did_then(llm):
    outputs = llm.generate(list(PROMPTS), SamplingParams(max_tokens=8, logprobs=0))
    answers = [output.outputs[0] for output in outputs]
    llm.engine.forget_prefixes()
    pairs = [(output.prompt_token_ids, answer.token_ids) for output, answer in zip(outputs, answers, strict=True)]
    path = llm.engine.path
    scores = score(llm.runner, pairs, path)
    for made, answer in zip(scores, answers, strict=True):
        assert made.greedy
        assert made.by_path == {path: len(answer.token_ids)}
        then = [logprobs[token].logprob for logprobs, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        torch.testing.assert_close(torch.tensor(made.logprobs), torch.tensor(then), rtol=1e-5, atol=1e-6)
    assert llm.runner.cache.allocator.available == llm.runner.cache.pages


def test_what_is_wrong_scores_less_and_is_not_greedy(llm):
    question = list(b"sort banana=")
    right, wrong = score(
        llm.runner, [(question, list(b"aaabnn\x03")), (question, list(b"aaabnx\x03"))], llm.engine.path
    )
    assert right.logprobs[:5] == wrong.logprobs[:5]
    assert right.logprobs[5] > -0.1 > -3 > wrong.logprobs[5]
    assert right.greedy
    assert not wrong.greedy


@pytest.mark.parametrize("pair", [([], [5]), ([5], []), ([5] * 40, [5] * 26)])
def test_what_cannot_be_scored_is_refused(llm, pair):
    with pytest.raises(RequestError, match="Pair 1 has"):
        score(llm.runner, [([5], [5]), pair])
    assert len(score(llm.runner, [([5] * 40, [5] * 25)], llm.engine.path)[0].logprobs) == 25
