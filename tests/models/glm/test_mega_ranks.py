"""The mega-task of several ranks: against one rank's, and to the bit among each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from rocmega.checkpoint import Checkpoint
from rocmega.errors import RequestError
from rocmega.models.glm import mega, presets
from rocmega.sampling import SamplingParams
from rocmega.sampling.choose import Choice, choose_rows
from tests.models.glm.kit import POSITIONS, Bench
from tests.models.glm.ranks import Launched, RankOutcome, RanksBench

# Heads, widths and vocabulary that 2, 3, 4 and 8 ranks can share.
SHARED = {
    **presets.PRESETS["glm-5.2-tiny"],
    "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], "first_k_dense_replace": 1,
    "num_attention_heads": 24, "num_key_value_heads": 24, "intermediate_size": 768, "moe_intermediate_size": 384,
    "vocab_size": 768,
}  # fmt: skip
SEEDS = 30

# A share is rounded once more than a whole: a sum of products in f32 is cut into as many pieces as there are ranks. In
# bf16 the inputs of later layers are then the same numbers, but for those that a last bit tips over. Relative L2.
LOGITS = {"f32": 1e-5, "bf16": 1e-2}
TOKENS = 3  # of each row in a launch; the third one's go on over a page's end


@pytest.fixture(scope="module")
def made(packed, tiny_checkpoint) -> Iterator[Callable[..., tuple[Bench, RanksBench]]]:
    """made(kind, tp): one rank and `tp` ranks of the same model, over the same noise."""
    closing: list[Bench | RanksBench] = []

    @cache
    def whole(kind: str) -> tuple[Bench, Checkpoint]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(presets.PRESETS, "shared", SHARED)
            patch.setattr(presets, "WRITABLE", (*presets.WRITABLE, "shared"))
            directory = tiny_checkpoint("shared", kind)
            closing.append(Bench(*packed("shared", kind), POSITIONS[:3]))
        return closing[-1], Checkpoint(directory)

    @cache
    def make(kind: str, tp: int, **options) -> tuple[Bench, RanksBench]:
        one, checkpoint = whole(kind)
        closing.append(RanksBench(one, checkpoint, tp, **options))
        return one, closing[-1]

    yield make
    for bench in reversed(closing):
        bench.close()


def same_on_all(outcomes: list[RankOutcome]) -> bool:
    first, *others = outcomes
    return all(first.outcome.same_bits(other.outcome) and torch.equal(first.x, other.x) for other in others)


@pytest.mark.parametrize(("kind", "tp"), [("bf16", 2), ("bf16", 3), ("f32", 4), ("f32", 8)])
def test_ranks_agree_with_one_rank_and_to_the_bit_with_each_other(kind, tp, made):
    """In bf16 with the mega-task of one. In f32 with PyTorch, which is as exact, and no kernel has to be compiled."""
    whole, ranks = made(kind, tp)
    want, got = whole.step() if kind == "bf16" else whole.standard_step(), ranks.step()
    assert same_on_all(got)
    assert got[0].outcome.tokens.tolist() == want.tokens.tolist()
    error = (got[0].outcome.logits - want.logits).norm() / want.logits.norm()
    assert error < LOGITS[kind]


def test_hidden_states_are_the_same_bits_at_every_layer(made):
    """As many mega-tasks as there are layers: between them the residual stream of every rank is looked at."""
    _, ranks = made("bf16", 3, mega_tasks=SHARED["num_hidden_layers"])
    seen: list[list[torch.Tensor]] = [[] for _ in range(3)]
    for path, list_of_rank in zip(ranks.paths, seen, strict=True):
        launch = path._launch
        path._launch = lambda path=path, launch=launch, to=list_of_rank: (launch(), to.append(path.region("x").clone()))
    ranks.step()
    assert [len(layers) for layers in seen] == [SHARED["num_hidden_layers"]] * 3
    for layer in zip(*seen, strict=True):
        assert all(torch.equal(layer[0], other) for other in layer)
    assert not torch.equal(seen[0][0], seen[0][1])


def test_any_order_and_any_number_of_blocks_gives_the_same_bits(made):
    _, ranks = made("bf16", 2)
    want = ranks.step()
    for seed in range(SEEDS):
        got = ranks.step(seed=seed, check=True)
        assert same_on_all(got), seed
        assert got[0].outcome.same_bits(want[0].outcome), seed
    _, other = made("bf16", 2, blocks=5)
    assert other.step(seed=4)[0].outcome.same_bits(want[0].outcome)


def test_fewer_rows_and_more_steps(made):
    _, ranks = made("bf16", 3)
    want = ranks.step()
    for rows in ([1], [0, 2], [0, 1, 2], [2]):
        got = ranks.step(rows, seed=len(rows), check=True)
        assert same_on_all(got)
        assert got[0].outcome.tokens.tolist() == want[0].outcome.tokens[rows].tolist()


def test_draws_are_those_of_the_whole_vocabulary_and_equal_on_all_ranks(made):
    _, ranks = made("bf16", 2)
    plain = ranks.step()
    params = SamplingParams(temperature=3.0)
    seen = set()
    for number in range(4):
        choices = [Choice(params, 1, number), None, Choice(SamplingParams(logit_bias={5: 100.0}), 0, 0)]
        got = ranks.step(choices=choices)
        assert same_on_all(got)
        outcome = got[0].outcome
        assert torch.equal(outcome.logits, plain[0].outcome.logits)
        assert outcome.tokens.tolist() == choose_rows(outcome.logits, choices)
        assert outcome.tokens[1:].tolist() == [int(plain[0].outcome.tokens[1]), 5]
        seen.add(int(outcome.tokens[0]))
    assert len(seen) > 1


def test_tags_begin_anew_on_all_ranks(made):
    _, ranks = made("bf16", 2)
    want = ranks.step()
    for path in ranks.paths:
        path._epoch = mega.LAST_EPOCH - 10
    for _ in range(3):
        assert ranks.step()[0].outcome.same_bits(want[0].outcome)
    assert all(path._epoch < 1000 for path in ranks.paths)


@pytest.fixture(scope="module")
def four_ranks(made) -> tuple[RanksBench, Launched]:
    """And what they give in a launch for each token."""
    _, ranks = made("f32", 4)
    return ranks, ranks.one_by_one(TOKENS)


def test_many_tokens_in_a_launch(four_ranks):
    """The bits of a launch for each token, on all ranks, and nothing for the checks to find."""
    ranks, want = four_ranks
    assert len({tuple(rows) for rows in want.tokens}) > 1
    assert all(got.same_bits(want) for got in ranks.launch(TOKENS))
    assert all(got.same_bits(want) for got in ranks.launch(TOKENS, seed=3, check=True))
    assert ranks.ranks.driver.last_report.reports == 0


def test_a_launch_ends_with_the_same_token_on_all_ranks(four_ranks):
    """With a row's stop token; and where one rank's host wants no more, whoever is further."""
    ranks, want = four_ranks[0], four_ranks[1].tokens
    end = next(step for step in range(1, TOKENS) if want[step][1] not in [rows[1] for rows in want[:step]])
    for got in ranks.launch(TOKENS, [(), (want[end][1],), ()]):
        assert got.tokens == want[: end + 1]
    impatient = ranks.paths[2]._ring
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(impatient, "begin", impatient.cancel)
        for got in ranks.launch(TOKENS):
            assert got.tokens == want[:1]


def test_ranks_do_not_draw_in_a_launch_of_many_tokens(four_ranks):
    ranks, _ = four_ranks
    choices = [Choice(SamplingParams(temperature=1.0), 1, 0), None, None]
    with pytest.raises(RequestError, match="several ranks: these draw when a step's launch is over"):
        ranks.paths[0].launch_many(ranks.whole.batch(), 1, [()] * 3, choices)
