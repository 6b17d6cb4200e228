"""The public API on the standard path; what the mega-task adds is tested with the models."""

import json
from pathlib import Path

import pytest
import torch

from rocmega import LLM, RequestOutput, RocmegaError, SamplingParams
from rocmega.errors import CheckpointError, ConfigError, RequestError

GREEDY = SamplingParams(max_tokens=6)


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny, path="standard", max_rows=4, max_model_len=128) as made:
        yield made


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_one_prompt_gives_one_output_in_the_familiar_shape(llm):
    [output] = llm.generate([3, 1, 4], GREEDY)
    [completion] = output.outputs
    assert output.prompt is None
    assert output.prompt_token_ids == [3, 1, 4]
    assert output.finished
    assert completion.index == 0
    assert completion.text == ""
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == 6
    assert all(isinstance(token, int) and 0 <= token < 512 for token in completion.token_ids)


def test_request_ids_go_on(llm):
    first, second = llm.generate([[1], [2]], GREEDY)
    [third] = llm.generate([1], GREEDY)
    numbers = [int(output.request_id) for output in (first, second, third)]
    assert numbers == list(range(numbers[0], numbers[0] + 3))


@pytest.mark.parametrize(
    "prompts",
    [
        [[5, 6, 7], [9]],
        ((5, 6, 7), (9,)),
        [torch.tensor([5, 6, 7]), torch.tensor([9])],
        [{"prompt_token_ids": [5, 6, 7]}, [9]],
    ],
)
def test_every_way_to_give_token_ids(llm, prompts):
    assert tokens(llm.generate(prompts, GREEDY)) == tokens(llm.generate([[5, 6, 7], [9]], GREEDY))


def test_rows_do_not_influence_each_other(llm):
    prompts = [[5, 6, 7], [9], list(range(70))]
    alone = [tokens(llm.generate(prompt, GREEDY))[0] for prompt in prompts]
    assert tokens(llm.generate(prompts, GREEDY)) == alone


def test_rows_may_end_at_different_steps(llm):
    prompts = [[5, 6, 7], [9], [11, 12]]
    lengths = [2, 5, 3]
    outputs = llm.generate(prompts, [SamplingParams(max_tokens=length) for length in lengths])
    assert [len(row) for row in tokens(outputs)] == lengths
    whole = tokens(llm.generate(prompts, SamplingParams(max_tokens=5)))
    assert tokens(outputs) == [row[:length] for row, length in zip(whole, lengths, strict=True)]


def test_a_longer_answer_continues_a_shorter_one(llm):
    [[*four]] = tokens(llm.generate([3, 1, 4], SamplingParams(max_tokens=4)))
    [[*more]] = tokens(llm.generate([3, 1, 4, *four], SamplingParams(max_tokens=3)))
    assert tokens(llm.generate([3, 1, 4], SamplingParams(max_tokens=7))) == [four + more]


def test_pages_are_given_back(llm):
    free = llm.runner.cache.allocator.available
    llm.generate([list(range(80)), [1]], GREEDY)
    assert llm.runner.cache.allocator.available == free


def test_pages_are_given_back_after_a_failure(llm, monkeypatch):
    free = llm.runner.cache.allocator.available

    def broken(batch):
        raise RuntimeError("broken")

    monkeypatch.setattr(llm.runner.standard, "decode", broken)
    with pytest.raises(RuntimeError, match="broken"):
        llm.generate([list(range(80)), [1]], GREEDY)
    assert llm.runner.cache.allocator.available == free


def test_the_observer_sees_the_logits_behind_each_token(llm):
    seen: dict[tuple[int, int], int] = {}

    def observe(request, number, logits):
        assert logits.shape == (512,)
        assert logits.dtype == torch.float32
        seen[request, number] = int(logits.argmax())

    rows = tokens(llm.generate([[5, 6], [7]], GREEDY, observer=observe))
    assert seen == {(row, step): token for row, ids in enumerate(rows) for step, token in enumerate(ids)}


def test_metrics_count_what_ran(tiny):
    with LLM(tiny, path="standard", max_rows=2, max_model_len=64) as llm:
        assert llm.metrics()["mega_coverage"] is None
        llm.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=5))
        metrics = llm.metrics()
    assert metrics["prompt_tokens"] == 4
    assert metrics["generated_tokens"] == 10
    assert metrics["steps"] == {"mega": 0, "fused": 0, "standard": 5}
    assert metrics["mega_coverage"] == 0
    assert metrics["decode_seconds"] > 0


def with_config(directory: Path, **fields) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return directory


def test_generation_stops_at_end_of_sequence(llm, tiny_copy):
    [ids] = tokens(llm.generate([3, 1, 4], SamplingParams(max_tokens=8)))
    end = ids[3]
    stop = ids.index(end) + 1
    with LLM(with_config(tiny_copy, eos_token_id=[end]), path="standard", max_rows=1, max_model_len=64) as stopping:
        [output] = stopping.generate([3, 1, 4], SamplingParams(max_tokens=8))
        assert output.outputs[0].token_ids == ids[:stop]
        assert output.outputs[0].finish_reason == "stop"
        [output] = stopping.generate([3, 1, 4], SamplingParams(max_tokens=8, ignore_eos=True))
        assert output.outputs[0].token_ids == ids
        assert output.outputs[0].finish_reason == "length"


def test_generation_stops_at_a_token_of_the_callers_choice(llm):
    [ids] = tokens(llm.generate([3, 1, 4], SamplingParams(max_tokens=8)))
    [output] = llm.generate([3, 1, 4], SamplingParams(max_tokens=8, stop_token_ids=[ids[2]]))
    assert output.outputs[0].token_ids == ids[: ids.index(ids[2]) + 1]


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ([], GREEDY, "no prompt"),
        ([[]], GREEDY, "Prompt 0 is empty"),
        ([[1], []], GREEDY, "Prompt 1 is empty"),
        ([[1], [2, 512]], GREEDY, "Prompt 1 holds token 512; this model's tokens are 0 to 511"),
        ([-1], GREEDY, "token -1"),
        ([1.5], GREEDY, "neither text nor a list of token ids"),
        ([[1], 2], GREEDY, "mixed"),
        ({"prompt": "x"}, GREEDY, "neither text nor a list"),
        ("text", GREEDY, "tokenizer.json"),
        ([1], SamplingParams(stop_token_ids=[512]), "stop_token_ids holds token 512"),
        ([1], SamplingParams(logit_bias={-1: 2.0}), "logit_bias holds token -1"),
        (list(range(123)), GREEDY, "longest context of 128"),
        ([1], SamplingParams(max_tokens=128), "max_model_len"),
        ([[1], [2]], [GREEDY], "2 prompts but 1 SamplingParams"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(llm, prompts, sampling, message):
    before, free = llm.metrics(), llm.runner.cache.allocator.available
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, sampling)
    assert llm.metrics() == before
    assert llm.runner.cache.allocator.available == free


def test_the_longest_context_is_allowed(llm):
    [output] = llm.generate(list(range(122)), GREEDY)
    assert len(output.outputs[0].token_ids) == 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "fast"}, "path='fast'"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"tensor_parallel_size": 2}, "this process is alone: start the program with `torchrun --nproc-per-node 2"),
        ({"max_rows": 17}, "max_rows=17"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"max_model_len": 5000}, "2 to 4096"),
        ({"blocks": 0}, "blocks=0"),
    ],
)
def test_impossible_settings_are_refused(tiny, fields, message):
    with pytest.raises(RocmegaError, match=message):
        LLM(tiny, **{"path": "standard", **fields})


def test_faults_of_a_checkpoint_keep_their_names(tiny_copy):
    with pytest.raises(ConfigError, match="no_such_type"):
        LLM(with_config(tiny_copy, model_type="no_such_type"))
    with pytest.raises(RocmegaError):
        LLM(tiny_copy / "elsewhere")
    shard = next(tiny_copy.glob("*.safetensors"))
    with_config(tiny_copy, model_type="glm_moe_dsa")
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        LLM(tiny_copy, path="standard")
