"""The harness's own evaluator with our model: tasks of a local file, both kinds of question."""

from __future__ import annotations

import json
import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
lm_eval = pytest.importorskip("lm_eval", reason="pip install 'rocmega[eval]'")

from rocmega.errors import RequestError  # noqa: E402
from rocmega.eval.puzzles import examination  # noqa: E402
from rocmega.models.glm.training import SHIPPED  # noqa: E402


@pytest.fixture(scope="module")
def model():
    from rocmega.eval.harness import Harness

    made = Harness(
        str(SHIPPED), path="standard", target="host", device="cuda:0", max_length=64, max_gen_toks=16, batch_size=4
    )
    yield made
    made.llm.close()


@pytest.fixture(scope="module")
def puzzles():
    return [puzzle for puzzle in examination(3) if puzzle.task in ("copy", "sort", "reverse")]


def task(name: str, file, **config):
    from lm_eval.api.task import ConfigurableTask

    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    return ConfigurableTask(config={"task": name, **data, "doc_to_text": "{{prompt}}", **config})


def test_it_evaluates(model, puzzles, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "puzzles.jsonl"
    # The wrong choice has the same letters.
    docs = [
        {"prompt": p.prompt, "answer": p.answer, "choices": [p.answer[1:] + p.answer[0], p.answer]} for p in puzzles
    ]
    file.write_text("".join(f"{json.dumps(doc)}\n" for doc in docs))
    choosing = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": 1}
    writing = {"output_type": "generate_until", "doc_to_target": "{{answer}}", "target_delimiter": "",
               "generation_kwargs": {"until": ["\n"], "do_sample": False}}  # fmt: skip
    exact = {"metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]}
    tasks = [task("choose", file, target_delimiter="", **choosing), task("write", file, **writing, **exact)]
    results = lm_eval.simple_evaluate(model=model, tasks=tasks, bootstrap_iters=0)["results"]
    assert results["choose"]["acc,none"] == 1
    assert results["write"]["exact_match,none"] == 1


def test_rolling_scores_every_token_once(model):
    from lm_eval.api.instance import Instance

    texts = ["copy abc=abc", "add 12+30=42\nadd 2+2=4\n" * 6]  # the second is longer than the context
    requests = [Instance("loglikelihood_rolling", {}, (text,), at) for at, text in enumerate(texts)]
    short, long = model.loglikelihood_rolling(requests)
    [(whole, greedy)] = model._loglikelihood_tokens([(None, [model.eot_token_id], list(texts[0].encode()))])
    assert short == pytest.approx(whole)
    assert not greedy
    assert long < 0


def test_what_is_not_known_is_refused(model):
    with pytest.raises(RequestError, match="num_beams"):
        model._sampling({"until": "\n", "num_beams": 4})
    assert model._sampling({"until": "\n", "max_gen_toks": 999}).max_tokens == 63
    assert model._sampling({"do_sample": True, "temperature": 0.5}).temperature == 0.5
    assert model._sampling({"do_sample": False, "temperature": 0.5}).greedy
