"""Tokens chosen in the kernel are the sampler's, bit for bit: same seed, same token. The logits stay as they were."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from rocmega.sampling import SamplingParams
from rocmega.sampling.choose import Choice, Uses, choose
from rocmega.sampling.device import ChoiceTable, adjustments
from tests.models.glm.kit import POSITIONS, Bench

USES = Uses(frozenset(range(0, 400, 3)), Counter({7: 3, 12: 1, 100: 2, 511: 1}))
PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3, top_k=5),
    SamplingParams(temperature=2.5, top_p=0.6),
    SamplingParams(temperature=1.0, min_p=0.3),
    SamplingParams(temperature=1.5, top_k=100, top_p=0.95, min_p=0.01),
    SamplingParams(temperature=1.0, repetition_penalty=1.7, frequency_penalty=0.4, presence_penalty=-0.3),
    SamplingParams(logit_bias={3: 100.0}),
    SamplingParams(repetition_penalty=3.0, logit_bias={12: 2.0, 13: -5.0, 3: 0.5}),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1e-30),
    SamplingParams(temperature=1e6, top_p=1e-9),
    SamplingParams(temperature=1.0, top_p=0.9999999999, logit_bias={n: n / 100 for n in range(300)}),
]


def choices(rows: int, seed: int) -> list[Choice | None]:
    """Of every kind, and rows without one."""
    turn = [None, *PARAMS][seed % 13 :] + [None, *PARAMS][: seed % 13]
    return [
        None if params is None else Choice(params, seed * 1000003 + row - 5, row * 7 + seed, USES)
        for row, params in zip(range(rows), turn * 2, strict=False)
    ]


def run(subject: Bench, wanted: list[Choice | None]) -> tuple[list[int], torch.Tensor]:
    subject.reset()
    result = subject.mega.decode(subject.batch(), choices=wanted)
    assert result.logits is not None
    return result.tokens.tolist(), result.logits.clone()


@pytest.fixture(scope="module")
def subject(bench) -> Bench:
    return bench("shallow", "f32", POSITIONS[:7], blocks=5)


@pytest.fixture(scope="module")
def plain(subject) -> tuple[list[int], torch.Tensor]:
    return run(subject, [None] * 7)


@pytest.mark.parametrize("seed", range(13))
def test_the_kernels_choice_is_the_samplers(seed, subject, plain):
    wanted = choices(7, seed)
    tokens, logits = run(subject, wanted)
    assert torch.equal(logits.view(torch.int32), plain[1].view(torch.int32))
    expected = [token if c is None else choose(row, c) for token, row, c in zip(plain[0], logits, wanted, strict=True)]
    assert tokens == expected


def test_choices_are_not_all_the_largest(subject, plain):
    """Else the tests above would say little."""
    different = sum(
        token != largest
        for seed in range(4)
        for token, largest in zip(run(subject, choices(7, seed))[0], plain[0], strict=True)
    )
    assert different > 10


def test_nothing_is_found_by_the_checks(bench):
    subject = bench("shallow", "f32", POSITIONS[:3], blocks=3)
    wanted = choices(3, 5)
    expected = run(subject, wanted)
    subject.driver.check = True
    for subject.driver.seed in (1, 2):
        tokens, logits = run(subject, wanted)
        assert subject.driver.last_report.reports == 0
        assert tokens == expected[0]
        assert torch.equal(logits, expected[1])


@pytest.mark.parametrize("blocks", [1, 16])
def test_any_number_of_blocks(blocks, bench):
    subject = bench("odd", "bf16", POSITIONS[:3], blocks=blocks)
    wanted = choices(3, 1)
    tokens, logits = run(subject, wanted)
    assert tokens == [int(row.argmax()) if c is None else choose(row, c) for row, c in zip(logits, wanted, strict=True)]


def test_a_token_has_one_adjustment():
    sampling = SamplingParams(presence_penalty=1.0, logit_bias={7: 0.25, 9: 1.0, 500: -1.0})
    entries = adjustments(Choice(sampling, 0, 0, Uses(frozenset({7, 8}), Counter({8: 2, 30: 1}))))
    assert sorted(entries) == [(7, 0.25, 0, 1), (8, 0.0, 2, 1), (9, 1.0, 0, 0), (30, 0.0, 1, 1), (500, -1.0, 0, 0)]


def test_there_is_room_for_every_adjustment(subject):
    table = ChoiceTable(subject.mega._header.structs, 2, 512, 150, "cpu")
    assert table.stride == 512  # no more tokens than the vocabulary has
    full = Choice(SamplingParams(presence_penalty=1.0), 0, 0, Uses(frozenset(range(512))))
    table.place([None, full])
    assert len(adjustments(full)) == 512
