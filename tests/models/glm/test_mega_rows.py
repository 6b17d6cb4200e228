"""Which rows are in a step, how many blocks run it and in which order threads come changes not one bit of a row."""

from __future__ import annotations

import pytest
import torch

from rocmega.models.glm.kernel import ROWS
from rocmega.models.glm.stages import LayerStages
from tests.models.glm.kit import POSITIONS, Bench, Outcome

BLOCKS = (1, 2, 3, 7, 16, 32)
SEEDS = 20
# Both sides of the odd model's index_topk of 100, and page borders.
ODD_POSITIONS = (150, 5, 99, 0, 98, 100, 63, 64, 65, 127, 128, 191, 300, 599, 31, 32)
ROWS_OF = {"glm-5.2-tiny": POSITIONS, "odd": ODD_POSITIONS}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("glm-5.2-tiny", "f32"), ("odd", "f32"), ("odd", "bf16"), ("odd", "fp8")],
)
def test_a_row_is_the_same_in_any_company(name, dtype, bench):
    """M = 1, 3, 8 and 16; in the odd model activations of 16 rows come in chunks and those of one row do not."""
    subject: Bench = bench(name, dtype, ROWS_OF[name])
    alone = {row: subject.step([row]) for row in (range(ROWS) if name != "odd" else (0, 3, 7, 13, 15))}
    for rows in (list(range(16)), [15, 0, 7], list(range(1, 16, 2))):
        together = subject.step(rows)
        for at, row in enumerate(rows):
            assert row not in alone or together.row(at).same_bits(alone[row]), f"row {row} among {rows}"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("glm-5.2-tiny", "f32"), ("odd", "bf16"), ("odd", "fp8")],
)
def test_the_kernel_of_one_row_gives_the_same_bits(name, dtype, bench):
    """And nothing is found in it; steps of more rows stay with the other kernel."""
    subject: Bench = bench(name, dtype, ROWS_OF[name])
    rows = (0, 3, 7, 13)
    alone, together = {row: subject.step([row]) for row in rows}, subject.step(rows)
    subject.remake(3, one_row=True)
    launched = recorded_launches(subject)
    assert subject.step(rows).same_bits(together)
    subject.driver.check = True
    for subject.driver.seed, row in enumerate(rows):
        assert subject.step([row]).same_bits(alone[row]), f"row {row}"
        assert subject.driver.last_report.reports == 0
    kernels = {function.handle for function in launched}
    assert len(kernels) == 2, "one of each"
    assert len({function.handle for function in launched[1:]}) == 1


def test_waves_without_an_expert_do_no_harm(bench):
    """One expert a token, each one unit of FP8: two of four waves have none of the second half, and load all the same.
    The bound is for sums of float32 in another order."""
    subject: Bench = bench("single", "fp8", (5,), activations="f32")
    assert subject.config.moe_intermediate_size <= 128
    torch.testing.assert_close(subject.step().logits, subject.standard_step().logits, atol=1e-4, rtol=0)


def recorded_launches(subject: Bench) -> list:
    launch, launched = subject.driver.launch, []
    subject.driver.launch = lambda function, *rest, **options: (
        launched.append(function),
        launch(function, *rest, **options),
    )
    return launched


def test_rows_share_experts_and_have_none_in_common(bench):
    """That the companies above meet both: duplicate choices are streamed once, others come for some rows only."""
    subject: Bench = bench("glm-5.2-tiny", "f32")
    subject.step()
    stages: LayerStages = subject.standard.layers[-1]
    words = subject.mega.region("router_scores", torch.int32).view(2, ROWS, -1, 2)[1, ..., 0].contiguous()
    products = words.view(torch.float32).unflatten(1, (-1, subject.config.n_routed_experts)).sum(1)
    squares = subject.mega.region("x_squares", torch.float32).view(2, ROWS, -1, 2)[1, ..., 0].sum(1, keepdim=True)
    rms = (squares / subject.config.hidden_size + subject.config.rms_norm_eps).rsqrt()
    experts, _ = stages.route(products * rms)
    shared = [len({*mine} & {*theirs}) for at, mine in enumerate(experts.tolist()) for theirs in experts.tolist()[:at]]
    assert min(shared) == 0
    assert max(shared) >= 2


@pytest.fixture(scope="module")
def mixed(bench) -> Bench:
    """Three rows: longer than the selection, shorter, and at a page border."""
    return bench("shallow", "f32", POSITIONS[:3])


@pytest.fixture(scope="module")
def expected(mixed) -> Outcome:
    return mixed.step()


@pytest.fixture
def driver(mixed, monkeypatch):
    for name in ("seed", "check"):
        monkeypatch.setattr(mixed.driver, name, getattr(mixed.driver, name))
    return mixed.driver


@pytest.mark.parametrize("blocks", BLOCKS)
def test_any_number_of_blocks_in_any_order(blocks, mixed, expected, driver):
    mixed.remake(blocks)
    for driver.seed in range(SEEDS):
        assert mixed.step().same_bits(expected), f"seed {driver.seed}"


@pytest.mark.parametrize("blocks", BLOCKS)
def test_nothing_is_found_by_the_checks(blocks, mixed, expected, driver):
    """Incoherent caches, stores that take their time, LDS races, and what nobody wrote in this step: as many seeds as
    there are schedulers. Two steps, so that the second meets the leavings of the first."""
    mixed.remake(blocks)
    driver.check = True
    for driver.seed in range(3):
        for _ in range(2 if blocks < 16 else 1):
            assert mixed.step().same_bits(expected), f"seed {driver.seed}"
            assert driver.last_report.reports == 0


@pytest.mark.parametrize(
    ("name", "dtype", "positions"),
    [
        ("glm-5-tiny", "f32", POSITIONS[:3]),
        ("odd", "bf16", ODD_POSITIONS[:3]),
        ("odd", "fp8", ODD_POSITIONS[:3]),
        ("odd", "f32", ODD_POSITIONS[:10]),  # activations in chunks
    ],
)
def test_nothing_is_found_in_other_models(name, dtype, positions, bench):
    subject: Bench = bench(name, dtype, positions)
    expected = subject.step()
    subject.driver.check = True
    for subject.driver.seed in (1, 2, 3) if len(positions) == 3 else (1,):
        assert subject.step().same_bits(expected)


@pytest.mark.parametrize("mega_tasks", [1, 2, 3, 4])
def test_any_split_into_mega_tasks(mega_tasks, mixed, expected, driver):
    mixed.remake(blocks=5, mega_tasks=mega_tasks)
    assert mixed.mega.launches_per_step == mega_tasks
    for driver.seed, driver.check in ((0, False), (1, True)):
        assert mixed.step().same_bits(expected)
