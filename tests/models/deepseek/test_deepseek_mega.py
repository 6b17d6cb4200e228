"""DeepSeek's mega-task against transformers, the reference and the standard path."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch

from rocmega.errors import ConfigError, RequestError
from rocmega.models.deepseek import kernel
from rocmega.models.deepseek.mega import MegaPath, slot_scales
from rocmega.step import StepBatch
from tests.models.deepseek.conftest import FAMILIES, STEPS
from tests.models.deepseek.kit import Pair

# Every phase of every compressor, around windows of 16, selections of 8 entries of 4, 2 and 1 tokens and 20 candidates.
LENGTHS = (75, 1, 20, 33, 62, 5, 15, 16, 17, 64, 63, 7, 3, 4, 8, 70)
NEAR = 1e-4  # float32 logits of some units, after sums of a few hundred products in another order in each of 12 layers


@pytest.fixture(scope="module")
def pairs(packed) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(*args, activations: str = "auto", **options) -> Pair:
        made.append(Pair(*packed(*args, activations=activations), activations=activations, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_64_greedy_tokens_equal_someone_elses(name, pairs, oracle, prompt):
    tokens, logits = oracle(name)
    pair = pairs(name)
    pair.begin(prompt, [len(prompt)])
    assert int(pair.tokens[0]) == tokens[0]
    for number in range(1, STEPS):
        found = pair.mega_step([0])[0]
        assert (found - logits[number]).abs().max() < NEAR
        assert int(found.argmax()) == tokens[number]
        pair.tokens[0], pair.positions[0] = tokens[number], pair.positions[0] + 1


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_in_all_phases_equal_the_standard_path(name, pairs, prompt):
    """Steps of any width, one after the other on the same regions; the caches are equal afterwards, too."""
    pair = pairs(name)
    pair.begin(prompt, LENGTHS)
    for rows in (range(16), [3], [8, 0, 5], range(8), range(16)):
        mine, theirs = pair.step(rows)
        assert (mine - theirs).abs().max() < NEAR
    assert pair.apart() < NEAR


@pytest.mark.parametrize("name", FAMILIES)
def test_bits_depend_on_nothing_but_the_row(name, pairs, prompt):
    """Neither on blocks, nor on the order of threads, nor on other rows, nor on how many launches a step is."""
    rows = range(5)
    pair = pairs(name, blocks=1)
    pair.begin(prompt, LENGTHS[: len(rows)])
    before = [pool.clone() for pool in pair.mine.cache.pools.values()]

    def again(rows, seed: int = 0, **options) -> torch.Tensor:
        for pool, was in zip(pair.mine.cache.pools.values(), before, strict=True):
            pool.copy_(was)
        pair.remake(**options)
        pair.mine.driver.seed = seed
        return pair.mega_step(rows)

    whole = again(rows, blocks=1)
    assert torch.equal(again(rows, 5, blocks=7), whole)
    assert torch.equal(again(rows, blocks=2, mega_tasks=3), whole)
    for row in (0, 3):
        assert torch.equal(again([row], 9, blocks=4), whole[row : row + 1])


@pytest.mark.parametrize(("name", "dtype"), [(name, "mxfp4") for name in FAMILIES])
def test_quantized_weights_are_read_as_they_are(name, dtype, pairs, prompt):
    """With float32 activations nothing is rounded, so that the paths agree as with float32 weights."""
    pair = pairs(name, dtype, activations="f32")
    pair.begin(prompt, LENGTHS[:3])
    for _ in range(3):
        mine, theirs = pair.step(range(3))
        assert (mine - theirs).abs().max() < NEAR


@pytest.mark.parametrize(("name", "dtype"), [(name, "mxfp4") for name in FAMILIES])
def test_rounded_activations(name, dtype, pairs, prompt):
    """The paths add in different orders, so a value in the middle of two bf16 numbers may be turned by one, which
    turns others, and now and then an expert. The standard path is within 3e-2 of exact activations on the same choices
    (test_deepseek_standard.py); were the roundings independent, the paths would be sqrt(2) times that apart. The middle
    one of 12 rows is asked for, as choices do turn in some.
    """
    pair = pairs(name, dtype)
    pair.begin(prompt, (75, 1, 33))
    apart = []
    for _ in range(4):
        mine, theirs = pair.step(range(3))
        apart.append((mine - theirs).norm(dim=1) / theirs.norm(dim=1))
    assert torch.stack(apart).median() < 2**0.5 * 3e-2


def test_what_cannot_be_run_is_refused(pairs, packed, prompt):
    pair = pairs("deepseek-v4-flash-tiny")
    pair.begin(prompt, (75, 5))
    table = pair.mine.cache.block_table([0, 0])
    with pytest.raises(RequestError, match="several rows of a step are of one request"):
        pair.mega.decode(StepBatch(pair.tokens[[0, 0]], torch.tensor([75, 76], dtype=torch.int32), table))
    config, weights = packed("deepseek-v4-flash-tiny", "mxfp4")
    published = config.cache_spec("published").open(2, 1, pair.mine.driver)
    with pytest.raises(ConfigError, match="its cache holds bf16 values, not published ones"):
        MegaPath(config, weights, published, pair.mine.driver, max_model_len=64)
    published.close()
    config, weights = packed("deepseek-v4.1-flash-tiny", "mxfp4")
    with pytest.raises(ConfigError, match="no fp8 activations for matrices in fp8_32"):
        kernel.unit(config, weights.formats, "host", activations="fp8")
    matrix = weights.layers[0]["q_a"]
    with pytest.raises(ConfigError, match="only where they are powers of two"):
        slot_scales(dataclasses.replace(matrix, scales=matrix.scales * 1.5))
    config, _ = packed("deepseek-v4-flash-tiny")
    with pytest.raises(ConfigError, match="o_groups 2 is not divisible by 4 ranks"):
        kernel.Shape.of(config, 4)
