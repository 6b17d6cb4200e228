"""Deliberate bugs in DeepSeek's own stages: the host target's checks name the stage, on some seed.

What only gives wrong values, the stages' other tests find; these are right on x86 nearly always.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from rocmega.errors import DriverError, StepError
from tests.models.glm.mutants import Mutant
from tests.stages import kit, test_candidates, test_compress, test_engram, test_streams

SEEDS = 5
ORDER = "missing: anything that orders the load behind the store"
STREAMS, ENGRAM, COMPRESS, CANDIDATES = (f"stages/{name}.h" for name in ("streams", "engram", "compress", "candidates"))

RUN: dict[str, tuple[object, Callable[[int], object]]] = {
    STREAMS: (test_streams, lambda seed: test_streams.site(256, 5, blocks=2, seed=seed)),
    ENGRAM: (test_engram, lambda seed: test_engram.step(48, 5, True, blocks=2, seed=seed)),
    COMPRESS: (test_compress, lambda seed: test_compress.Bench(test_compress.KINDS["V4.1 ratio 2"]).run(2, seed)),
    CANDIDATES: (test_candidates, lambda seed: test_candidates.step(16, 1, False, seed=seed)),
}
MUTANTS = [
    (
        Mutant("sums over waves before all waves have theirs", STREAMS,
               "block_barrier();\n        for (int n = thread_id(); n <= N;", "for (int n = thread_id(); n <= N;"),
        "LDS race", "mix",
    ),
    (
        Mutant("a site's products over those that are read", STREAMS,
               "      block_barrier();  // before the products of the next row\n", ""),
        "LDS race", "site",
    ),
    (
        Mutant("a mixing weight that nobody publishes", STREAMS,
               "n < 2 * STREAMS; n += THREADS)", "n < 2 * STREAMS - 1; n += THREADS)"),
        "of site, sees 0 (never written by a kernel)", "expand",
    ),
    (
        Mutant("rows to look up over those that are read", ENGRAM,
               "    block_barrier();  // before the columns' rows are written again\n", ""),
        "LDS race", "look_up",
    ),
    (
        Mutant("the state of another request", COMPRESS,
               "((u64)load_constant(slots + row) * SPAN", "((u64)load_constant(slots) * SPAN"),
        ORDER, "compress",
    ),
    (
        Mutant("candidates read without their flag", CANDIDATES,
               "return s.wait_flag(candidates.flags + row, tag);", "return true;"),
        ORDER, "select",
    ),
    (
        Mutant("candidates stored plain", CANDIDATES,
               "store_device(of_row(row) + block, (u32)in, tag);", "store_plain(of_row(row) + block, (u32)in, tag);"),
        "missing: release_device()", "select",
    ),
    (
        Mutant("scores read without an acquire", CANDIDATES, "        acquire_device();\n", ""),
        "missing: acquire_device()", "candidates",
    ),
]  # fmt: skip


def on_seeds(run: Callable[[int], object]) -> None:
    for seed in range(SEEDS):
        run(seed)


@pytest.fixture(scope="module")
def mutants_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Mutants do not fill the user's."""
    return str(tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize(("mutant", "message", "stage"), MUTANTS, ids=[mutant.bug for mutant, *_ in MUTANTS])
def test_a_bug_is_caught(
    mutant: Mutant, message: str, stage: str, monkeypatch: pytest.MonkeyPatch, mutants_cache: str
) -> None:
    module, run = RUN[mutant.file]
    monkeypatch.setenv("ROCMEGA_CACHE", mutants_cache)
    monkeypatch.setattr(module, "function", functools.partial(kit.function, headers={mutant.file: mutant.source()}))
    with pytest.raises((DriverError, StepError, AssertionError)) as failed:
        on_seeds(run)
    assert message in str(failed.value)
    assert f"stage {stage}" in str(failed.value)
