"""The sampler: its weights against exp, its filters against their definitions, its draws against the distribution."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocmega.sampling import SamplingParams
from rocmega.sampling.choose import Choice, Uses, adjust, choose, keep, weights

DRAWS = 1500
LOGITS = torch.tensor([1.5, 0.25, -0.5, 2.0, 2.0, -3.0, 0.0, 1.0])


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **fields})


def drawn(logits: torch.Tensor, sampling: SamplingParams, uses: Uses | None = None) -> Counter[int]:
    return Counter(choose(logits, Choice(sampling, seed, seed % 7, uses)) for seed in range(DRAWS))


def chi_square(counts: Counter[int], probabilities: torch.Tensor) -> float:
    return sum((counts[t] - DRAWS * p) ** 2 / (DRAWS * p) for t, p in enumerate(probabilities.tolist()) if p > 0)


def expected(logits: torch.Tensor, kept: list[int], temperature: float = 1.0) -> torch.Tensor:
    mask = torch.full_like(logits, -math.inf, dtype=torch.float64)
    mask[kept] = 0
    return (logits.double() / temperature + mask).softmax(0)


def test_weights_are_exponentials():
    z = torch.cat([torch.linspace(-21, 0, 5001), torch.tensor([-21.4, -21.5, -40.0, -1e30])])
    exact = (z - z.max()).double().exp() * 2**31
    assert ((weights(z) - exact).abs() <= 1 + exact * 2e-6).all()  # 2e-6: float32's rounding of the exponent, 21 / 2^24
    assert weights(z)[-2:].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, range(8)),
        ({"temperature": 0.6}, range(8)),
        ({"temperature": 3.0}, range(8)),
        ({"top_k": 3}, [0, 3, 4]),
        ({"top_k": 1}, [3, 4]),  # a tie
        ({"top_p": 0.5}, [3, 4]),
        ({"top_p": 0.72}, [0, 3, 4]),
        ({"min_p": 0.3}, [0, 3, 4, 7]),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.05}, [0, 3, 4, 7]),
    ],
)
def test_draws_have_the_models_distribution(fields, kept):
    sampling = params(**fields)
    assert keep(LOGITS / sampling.temperature, sampling).nonzero().flatten().tolist() == list(kept)
    counts = drawn(LOGITS, sampling)
    assert set(counts) <= set(kept)
    # 7 degrees of freedom: 29.9 is exceeded once in 10,000.
    assert chi_square(counts, expected(LOGITS, list(kept), sampling.temperature)) < 29.9


def test_the_test_would_see_another_distribution():
    assert chi_square(drawn(LOGITS, params(temperature=1.5)), expected(LOGITS, list(range(8)))) > 29.9


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    st.integers(0, 45),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.floats(0.05, 5),
    st.integers(0, 2**64 - 1),
)
def test_filters_are_their_definitions(values, top_k, top_p, min_p, temperature, seed):
    logits = torch.tensor(values, dtype=torch.float32)
    sampling = params(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    z = logits / temperature
    kept = keep(z, sampling)
    chosen = choose(logits, Choice(sampling, seed, 3))
    assert kept[chosen]
    assert kept[z.argmax()]
    below = z[~kept]
    assert not len(below) or below.max() < z[kept].min()  # a threshold
    if top_k and top_p == 1 and min_p == 0:
        assert kept.sum() >= min(top_k, len(values))
    if top_p < 1:  # without the least that is kept, the others have less than top_p
        rest = weights(z)[kept & (z > z[kept].min())].sum()
        assert rest <= top_p * weights(z)[kept].sum() + 1 or min_p > 0 or top_k > 0


def test_a_token_does_not_depend_on_other_draws():
    sampling = params()
    alone = [choose(LOGITS, Choice(sampling, 11, n)) for n in range(30)]
    for n in (29, 3, 17):
        assert choose(LOGITS, Choice(sampling, 11, n)) == alone[n]
    assert [choose(LOGITS, Choice(sampling, 12, n)) for n in range(30)] != alone


def test_greedy_takes_the_lowest_of_equals_and_no_seed():
    assert {choose(LOGITS, Choice(SamplingParams(), seed, 0)) for seed in range(5)} == {3}
    assert choose(LOGITS, Choice(SamplingParams(logit_bias={3: -0.5}), 0, 0)) == 4


def test_penalties_are_their_formulas():
    uses = Uses(frozenset({0, 5}), Counter({3: 2, 5: 1}))
    sampling = params(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={1: 1.0})
    out = adjust(LOGITS, sampling, uses)
    assert out.tolist() == [0.75, 1.25, -0.5, 1.0 - 2 * 0.5 - 0.25, 2.0, -6.0 - 0.5 - 0.25, 0.0, 1.0]
    assert LOGITS[1] == 0.25  # the input is left alone
    counts = drawn(LOGITS, sampling, uses)
    assert chi_square(counts, expected(out, list(range(8)))) < 29.9


def test_a_penalty_for_what_is_not_there_changes_nothing():
    sampling = params(frequency_penalty=1.0, presence_penalty=1.0)
    assert torch.equal(adjust(LOGITS, sampling, Uses(frozenset({1, 2}))), LOGITS)
