"""The engine over a real tiny model: answers on the mega path do not depend on the company, to the last bit."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from rocmega import LLM, Request, RequestOutput, SamplingParams
from rocmega.engine import Engine
from rocmega.errors import RequestError, RocmegaError
from tests.api.test_tokenizer import write_tokenizer

STEM = [(7 * at) % 512 for at in range(100)]
PROMPTS = [[3, 1, 4], [*STEM[:70], 5], [*STEM[:66], 8, 9], [11], STEM[:60]]
SAMPLINGS = [
    SamplingParams(max_tokens=8),
    SamplingParams(max_tokens=6, temperature=1.0, seed=5),
    SamplingParams(max_tokens=9, temperature=0.7, top_p=0.9, top_k=50, seed=1, repetition_penalty=1.2),
    SamplingParams(max_tokens=7, temperature=1.3, min_p=0.02, seed=2, frequency_penalty=0.3, logprobs=2),
    SamplingParams(max_tokens=10, presence_penalty=0.5, logprobs=0),
]


@pytest.fixture(scope="module")
def mega(tiny):
    with LLM(tiny, path="mega", device="host", max_rows=3, max_model_len=128, cache_pages=4, prefill_chunk=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(mega) -> list[RequestOutput]:
    """Each request with the model to itself, and nothing in the cache."""
    outputs = []
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True):
        mega.engine.forget_prefixes()
        outputs += mega.generate(prompt, sampling)
    return outputs


@pytest.mark.parametrize("seed", range(3))
def test_answers_do_not_depend_on_the_company(seed, mega, alone):
    generator = random.Random(seed)
    coming = [Request(list(prompt), sampling) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]
    requests = generator.sample(coming, len(coming))
    waiting = list(requests)
    while waiting or mega.engine.running or mega.engine.waiting:
        while waiting and generator.random() < 0.5:
            mega.engine.add(waiting.pop())
        mega.engine.step()
    for request, solo in zip(coming, alone, strict=True):
        mine, theirs = request.output().outputs[0], solo.outputs[0]
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == theirs.logprobs  # of all bits, not nearly
        assert request.output().mega_coverage == 1


def test_a_request_that_was_thrown_out_answers_the_same(mega):
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=3, logprobs=0)
    prompts = [STEM[:60], STEM[10:70]]
    mega.engine.forget_prefixes()
    solo = [mega.generate(prompt, sampling)[0].outputs[0] for prompt in prompts]
    engine = Engine(mega.runner, path="mega", prefill_chunk=64)
    requests = [Request(list(prompt), sampling) for prompt in prompts]
    mega.engine.forget_prefixes()
    other = mega.runner.sequence()
    mega.runner.cache.grow(other.number, 64)  # three pages are left, and the two will want four
    for request in requests:
        engine.add(request)
    while engine.running or engine.waiting:
        engine.step()
    other.close()
    assert [request.preemptions for request in requests] == [0, 1]
    assert [request.output().outputs[0] for request in requests] == solo


@pytest.fixture(scope="module")
def llm(tiny, tmp_path_factory):
    import shutil

    directory = shutil.copytree(tiny, tmp_path_factory.mktemp("text") / "model")
    write_tokenizer(directory)
    with LLM(directory, path="standard", max_rows=3, max_model_len=128) as made:
        yield made


def test_more_prompts_than_rows_take_turns(llm):
    prompts = [[number] for number in range(8)]
    together = llm.generate(prompts, SamplingParams(max_tokens=3))
    assert [len(output.outputs[0].token_ids) for output in together] == [3] * 8
    assert llm.metrics()["waiting"] == llm.metrics()["running"] == 0


def test_a_stream_is_the_answer_token_by_token(llm):
    sampling = SamplingParams(max_tokens=5, temperature=0.9, seed=4)
    states = list(llm.stream("the quick fox", sampling))
    [whole] = llm.generate("the quick fox", sampling)
    assert [len(state.outputs[0].token_ids) for state in states] == [1, 2, 3, 4, 5]
    assert [state.finished for state in states] == [False] * 4 + [True]
    assert states[-1].outputs == whole.outputs
    assert all(whole.outputs[0].text.startswith(state.outputs[0].text) for state in states)


def test_a_stream_that_is_left_early_ends_its_requests(llm):
    before = llm.metrics()["finished"].get("abort", 0)
    stream = llm.stream([[1, 2], [3]], SamplingParams(max_tokens=50))
    next(stream)
    stream.close()
    assert llm.metrics()["finished"]["abort"] == before + 2
    assert llm.metrics()["pages"]["held"] == 0


def test_stop_texts_end_the_answer_and_are_left_out(llm):
    [whole] = llm.generate("the", SamplingParams(max_tokens=8))
    words = whole.outputs[0].text.split()
    stop = next(word for at, word in enumerate(words) if at >= 3 and word not in " ".join(words[:at]))
    [cut] = llm.generate("the", SamplingParams(max_tokens=8, stop=[stop, "never"]))
    assert cut.outputs[0].finish_reason == "stop"
    assert cut.outputs[0].stop_reason == stop
    assert cut.outputs[0].text.split() == words[: words.index(stop)]
    [kept] = llm.generate("the", SamplingParams(max_tokens=8, stop=stop, include_stop_str_in_output=True))
    assert kept.outputs[0].text.endswith(stop)


def test_stop_texts_without_a_tokenizer_are_refused(mega):
    with pytest.raises(RequestError, match="stop_token_ids"):
        mega.generate([1], SamplingParams(stop="x"))


def test_logprobs_are_those_of_the_models_logits(llm):
    rows = []
    sampling = SamplingParams(max_tokens=4, temperature=2.0, seed=8, logprobs=3)
    [output] = llm.generate([5, 6], sampling, observer=lambda request, number, logits: rows.append(logits.clone()))
    [answer] = output.outputs
    assert len(answer.logprobs) == 4
    total = 0.0
    for token, entries, row in zip(answer.token_ids, answer.logprobs, rows, strict=True):
        expected = row.log_softmax(-1)
        best = expected.topk(3).indices.tolist()
        assert list(entries) == [*best, *([token] if token not in best else [])]
        assert [entries[at].rank for at in best] == [1, 2, 3]
        assert entries[token].rank == 1 + int((expected > expected[token]).sum())
        assert all(entry.logprob == pytest.approx(float(expected[at]), abs=1e-6) for at, entry in entries.items())
        assert entries[token].decoded_token == llm.tokenizer.decode([token])
        total += entries[token].logprob
    assert answer.cumulative_logprob == pytest.approx(total)
    [quiet] = llm.generate([5, 6], SamplingParams(max_tokens=2))
    assert quiet.outputs[0].logprobs is quiet.outputs[0].cumulative_logprob is None


def test_a_seed_gives_the_same_tokens_and_none_gives_others(llm):
    sampling = SamplingParams(max_tokens=8, temperature=1.5, seed=9)
    first, second, *_ = llm.generate([[1, 2], [1, 2], [3]], sampling)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    free = SamplingParams(max_tokens=8, temperature=1.5)
    first, second = llm.generate([[1, 2], [1, 2]], free)
    assert first.outputs[0].token_ids != second.outputs[0].token_ids


def test_coroutines_share_the_engine(llm):
    sampling = SamplingParams(max_tokens=6)
    prompts = [[1, 2], [3, 4, 5], "the fox", [9], [8, 7]]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]

    async def all_at_once():
        return await asyncio.gather(*(llm.generate_async(prompt, sampling) for prompt in prompts))

    assert [output.outputs[0].token_ids for output in asyncio.run(all_at_once())] == expected

    async def leave_early():
        async for state in llm.stream_async([1, 2], SamplingParams(max_tokens=100)):
            if len(state.outputs[0].token_ids) >= 2:
                break

    asyncio.run(leave_early())
    deadline = time.monotonic() + 60
    while llm.metrics()["pages"]["held"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert llm.metrics()["pages"]["held"] == llm.metrics()["running"] == 0


def test_coroutines_hear_of_a_step_that_failed_and_the_engine_goes_on(llm, monkeypatch):
    def broken(batch):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(llm.runner.standard, "decode", broken)
        with pytest.raises(RocmegaError, match="the device is gone"):
            asyncio.run(llm.generate_async([1, 2], SamplingParams(max_tokens=3)))
    [output] = llm.generate([1, 2], SamplingParams(max_tokens=3))
    assert asyncio.run(llm.generate_async([1, 2], SamplingParams(max_tokens=3))).outputs == output.outputs


def test_a_closed_model_ends_what_runs(tiny):
    llm = LLM(tiny, path="standard", max_rows=1, max_model_len=2048)

    async def wait():
        task = asyncio.create_task(llm.generate_async([1], SamplingParams(max_tokens=2000)))
        while not llm.engine.running:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(llm.close)
        with pytest.raises(RocmegaError, match="closed"):
            await task

    asyncio.run(wait())


def test_a_cache_too_small_for_one_request_is_refused(tiny):
    with pytest.raises(RequestError, match="1 pages of 64 tokens"):
        LLM(tiny, path="standard", max_model_len=128, cache_pages=1)
    with pytest.raises(RequestError, match="prefill_chunk=100"):
        LLM(tiny, path="standard", max_model_len=128, prefill_chunk=100)


def test_logits_are_not_computed_for_nothing(llm, monkeypatch):
    asked = []
    step = llm.runner.step
    monkeypatch.setattr(
        llm.runner, "step", lambda *a, logits, **more: asked.append(logits) or step(*a, logits=logits, **more)
    )
    llm.generate([1], SamplingParams(max_tokens=1))
    llm.generate([1], SamplingParams(max_tokens=1, logprobs=0))
    assert asked == [False, True]


def test_guesses_change_nothing(tiny):
    """Greedy and drawn, with penalties and log probabilities, alone and together: all bits."""
    loop = [3, 1, 4, 1, 5, 9] * 5
    samplings = [
        SamplingParams(max_tokens=14, logit_bias=dict.fromkeys(loop, 60.0)),  # few tokens, so that guesses are right
        SamplingParams(max_tokens=12, temperature=1.0, seed=4, logit_bias=dict.fromkeys([1, 3], 60.0), logprobs=1),
        SamplingParams(max_tokens=9, temperature=0.8, top_p=0.8, seed=5, presence_penalty=0.5, logprobs=0),
    ]
    requests = [(loop, samplings[0]), ([1, 3] * 9, samplings[1]), (loop[2:], samplings[2])]
    settings = {"path": "mega", "device": "host", "max_rows": 8, "max_model_len": 64}
    with LLM(tiny, **settings) as llm:
        plain = [output.outputs for prompt, sampling in requests for output in llm.generate(prompt, sampling)]
    with LLM(tiny, **settings, draft_tokens=4) as llm:
        prompts, samplings = zip(*requests, strict=True)
        guessed = llm.generate(list(prompts), list(samplings))
        metrics = llm.metrics()
    assert [output.outputs for output in guessed] == plain
    assert 0 < metrics["accepted_tokens"] < metrics["drafted_tokens"]
    assert metrics["steps"]["mega"] < 14
    assert metrics["mega_coverage"] == 1
    assert sum(output.num_accepted_tokens for output in guessed) == metrics["accepted_tokens"]


def test_impossible_numbers_of_guesses_are_refused(tiny):
    for guesses in (-1, 2):
        with pytest.raises(RequestError, match=f"draft_tokens={guesses}"):
            LLM(tiny, path="standard", max_rows=2, max_model_len=64, draft_tokens=guesses)


def test_many_tokens_a_launch_change_nothing(tiny):
    """Requests of different lengths, drawn and greedy, one with a stop token and one that needs the host."""
    prompts = [[3, 1, 4], list(range(40, 100)), [9], [8, 8]]
    settings = {"path": "mega", "device": "host", "max_rows": 3, "max_model_len": 128}
    with LLM(tiny, **settings) as llm:
        [free] = llm.generate(prompts[0], SamplingParams(max_tokens=9))
        samplings = [
            SamplingParams(max_tokens=9, stop_token_ids=[free.outputs[0].token_ids[3]]),
            SamplingParams(max_tokens=12, temperature=1.0, seed=4, top_k=30),
            SamplingParams(max_tokens=5, temperature=0.7, seed=6),
            SamplingParams(max_tokens=4, logprobs=1),
        ]
        plain = [output.outputs for output in llm.generate(prompts, samplings)]
    with LLM(tiny, **settings, tokens_per_launch=8) as llm:
        many = llm.generate(prompts, samplings)
        metrics = llm.metrics()
    assert [output.outputs for output in many] == plain
    assert metrics["launches_of_several_steps"] >= 2
    behind = "a request has penalties, wants log probabilities or is behind after a preemption"
    assert metrics["single_step_reasons"][behind] == 4
    assert metrics["mega_coverage"] == 1
    assert metrics["pages"]["held"] == 0


def test_a_stream_reads_a_launch_while_it_runs(tiny):
    """One launch for the whole answer, a token at a time; who leaves early ends it, and nothing is left behind."""
    settings = {"path": "mega", "device": "host", "max_rows": 2, "max_model_len": 128, "blocks": 2}
    with LLM(tiny, **settings) as llm:
        [whole] = llm.generate([3, 1, 4], SamplingParams(max_tokens=5))
    with LLM(tiny, **settings, tokens_per_launch="auto") as llm:
        stream = llm.stream([3, 1, 4], SamplingParams(max_tokens=120))
        for count in range(1, 4):
            assert len(next(stream).outputs[0].token_ids) == count
            assert not llm.runner._mega._flight._running.done()  # with over a hundred tokens to go
        stream.close()
        assert llm.runner._mega._flight._running.done()
        metrics = llm.metrics()
        assert metrics["launches_of_several_steps"] == 1
        assert metrics["tokens"]["mega"] < 20
        assert metrics["pages"]["held"] == metrics["running"] == 0

        async def both() -> list[RequestOutput]:
            return await asyncio.gather(*(llm.generate_async([3, 1, 4], SamplingParams(max_tokens=5)) for _ in "ab"))

        for output in asyncio.run(both()):
            assert output.outputs[0].token_ids == whole.outputs[0].token_ids


@pytest.mark.parametrize("tokens", [0, 257])
def test_impossible_launches_are_refused(tiny, tokens):
    with pytest.raises(RequestError, match=f"tokens_per_launch={tokens}"):
        LLM(tiny, path="standard", max_model_len=64, tokens_per_launch=tokens)
