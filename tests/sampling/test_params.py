import pytest

from rocmega.errors import RequestError
from rocmega.sampling import SamplingParams

IMPOSSIBLE = {
    "max_tokens": [0, -1, 1.5, True],
    "temperature": [-0.1, float("nan"), float("inf"), 1e-40, "hot"],
    "top_k": [-2, 1.5],
    "top_p": [0, 1.1, float("nan")],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1],
    "frequency_penalty": [2.1, None],
    "presence_penalty": [-2.1],
    "logit_bias": [{"a": 1.0}, {1: float("inf")}, [1]],
    "seed": [1 << 64, 0.5],
    "logprobs": [-1, 21],
    "stop": ["", ["a", ""], [1]],
    "stop_token_ids": [["a"], "12", 3],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in IMPOSSIBLE.items() for value in values])
def test_what_cannot_be_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_every_fault_is_listed():
    with pytest.raises(RequestError, match=r"max_tokens=0 .*top_p=2 .*min_p=-1"):
        SamplingParams(max_tokens=0, top_p=2, min_p=-1)


def test_greedy_may_be_said_in_two_ways():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=0.5).greedy


def test_plain_is_what_the_mega_task_chooses_by_itself():
    assert SamplingParams(stop=["x"], logprobs=3, top_p=0.5, seed=3).plain
    assert not any(
        SamplingParams(**fields).plain
        for fields in ({"temperature": 1.0}, {"logit_bias": {1: 1.0}}, {"presence_penalty": 1.0})
    )


def test_token_ids_are_checked_against_the_vocabulary():
    SamplingParams(stop_token_ids=[511], logit_bias={0: 1.0}).check_vocab(512)
    with pytest.raises(RequestError, match="stop_token_ids holds token 512"):
        SamplingParams(stop_token_ids=[512]).check_vocab(512)
    with pytest.raises(RequestError, match="logit_bias holds token -1"):
        SamplingParams(logit_bias={-1: 1.0}).check_vocab(512)


def test_one_stop_text_or_several():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")
