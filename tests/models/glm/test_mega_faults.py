"""Deliberate bugs: each must end as an error that names a stage, within seconds, and none may go unnoticed.

Waits that cannot end are told by the kernel's own limit, as on a GPU; what x86 hides, incoherent caches, late stores
and races in LDS, by the host target's checks.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from rocmega import descriptor
from rocmega.errors import DriverError, RequestError, StepError
from rocmega.models.glm import kernel, mega
from rocmega.sampling import SamplingParams
from rocmega.sampling.choose import Choice, Uses
from rocmega.step import StepBatch
from tests.models.glm.kit import POSITIONS, Bench, Outcome
from tests.models.glm.mutants import Mutant, build

STAGES = [name.lower() for name in descriptor.load(kernel.FOLDER / "stages.h").enums["Stage"]]
SEEDS = 10
SECONDS = 30.0  # in which a bug is found

ANNOUNCE = """    drain();
    block_barrier();
    if (wave_id() != 0) return;
    if (how == Stored::PLAIN) release_device();
    if (lane_id() == 0) publish(flag, {0, at_tag});
"""

# Waits that never end: found by the kernel's limit as well as by the host's watch.
STUCK = [
    (
        Mutant("a producer is missing", "glm/matrices.h",
               "    f32 scale = inverse_rms(c.s, to.row), q[2]",
               "    if (task == 3) return;\n    f32 scale = inverse_rms(c.s, to.row), q[2]"),
        r"in stage attend, task \d+",  # which alone reads this part of a query
    ),
    (
        Mutant("a wait for the wrong flag", "stages/attend.h",
               "written.wait(s, at.row, tag)", "written.wait(s, at.row + 1, tag)"),
        r"in stage attend, task \d+",
    ),
    (
        Mutant("a wait for the wrong epoch", "glm/decode.hip",
               "tag(2 * selection_layer + 1)", "attention_tag()"),
        r"in stage attend, task \d+",
    ),
    (
        Mutant("a flag is never announced", "stages/select.h",
               "s.announce(flags + row, tag, Stored::THROUGH);", "block_barrier();"),
        r"in stage attend, task \d+",
    ),
]  # fmt: skip

ORDER = "missing: anything that orders the load behind the store"

# Wrong only on a device that does what it may: found by the checks on some seed.
CAUGHT = [
    (
        Mutant("no drain before the flag", "handoff/step.h", ANNOUNCE, ANNOUNCE.replace("    drain();\n", "")),
        "missing: drain() by",
    ),
    (
        Mutant("the flag before the data", "handoff/step.h", ANNOUNCE,
               "    if (thread_id() == 0) publish(flag, {0, at_tag});\n    drain();\n    block_barrier();\n"),
        ORDER,
    ),
    (
        Mutant("only one wave drains", "handoff/step.h", ANNOUNCE,
               ANNOUNCE.replace("    drain();\n", "    if (wave_id() == 0) drain();\n")),
        "missing: drain() by",
    ),
    (
        Mutant("the barrier after the flag", "handoff/step.h", ANNOUNCE,
               "    drain();\n    if (how == Stored::PLAIN && wave_id() == 0) release_device();\n"
               "    if (thread_id() == 0) publish(flag, {0, at_tag});\n    block_barrier();\n"),
        "missing: ",
    ),
    (
        Mutant("no release after plain stores", "handoff/step.h", ANNOUNCE,
               ANNOUNCE.replace("    if (how == Stored::PLAIN) release_device();\n", "")),
        "missing: release_device() on XCD",
    ),
    (
        Mutant("no acquire before plain loads", "stages/attend.h",
               "      if (written_now(at)) acquire_device();\n", ""),
        "missing: acquire_device() by this wave",
    ),
    (
        Mutant("a tagged pair stored plain", "handoff/step.h",
               "store_pair(at, {bits<u32>(value), tag});", "store_plain(at, Pair{bits<u32>(value), tag}, tag);"),
        "not released",
    ),
    (
        Mutant("no barrier before LDS is used again", "stages/linear.h",
               "  block_barrier();  // before shares are written again", "  // before shares are written again"),
        "LDS race",
    ),
    (
        Mutant("no barrier between two sums over the block", "stages/cache_entry.h",
               "    block_barrier();  // since the last block_sum\n", ""),
        "LDS race",
    ),
    (
        Mutant("tags that come again", "glm/context.h",
               ": 0) + version; }", ": 0) + version % 4; }"),
        "epochs must grow",
    ),
    (
        Mutant("a selection read without its flag", "stages/attend.h",
               "if (selected.listed(at.row)) ok = s.wait_flag(selection_flags + at.row, selection_tag);", ""),
        "wants epoch",
    ),
    (
        Mutant("parts merged without their flags", "stages/attend.h", "s.wait_flags(splits,", "s.wait_flags(0,"),
        ORDER,
    ),
    (
        Mutant("a block counts its tasks wrong", "stages/select.h",
               "    s.finish(s.rows);", "    s.finish(s.rows + (block_id() == 1));"),
        "stored tag",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def subject(bench) -> Bench:
    """Three rows: longer than the selection, shorter, and at a page border."""
    return bench("glm-5.2-tiny", "bf16", POSITIONS[:3])


@pytest.fixture(scope="module")
def expected(subject) -> Outcome:
    return subject.step()


@pytest.fixture(scope="module")
def mutants_cache(tmp_path_factory) -> str:
    """Mutants do not fill the user's."""
    return str(tmp_path_factory.mktemp("mutants"))


@pytest.fixture
def put(subject, expected, tmp_path, monkeypatch, mutants_cache) -> Iterator[Callable[[Mutant | None], None]]:
    """put(mutant): the bench runs it from now on."""
    monkeypatch.setenv("ROCMEGA_CACHE", mutants_cache)
    before = dict(vars(subject.driver))

    def make(mutant: Mutant | None) -> None:
        subject.remake(3, artifact=build(mutant, subject.config, subject.weights.formats, tmp_path))

    yield make
    vars(subject.driver).update(before)


def steps_with_checks(subject: Bench, expected: Outcome, seeds: int = SEEDS) -> None:
    subject.driver.check = True
    for subject.driver.seed in range(seeds):
        assert subject.step().same_bits(expected)


def test_without_a_bug_there_is_no_report(subject, expected, put):
    put(None)
    steps_with_checks(subject, expected, 3)


@pytest.mark.parametrize(("mutant", "message"), STUCK, ids=[mutant.bug for mutant, _ in STUCK])
def test_a_wait_that_cannot_end_is_reported(mutant, message, subject, put):
    put(mutant)
    for check, watch, limit in ((False, False, 2000), (False, True, mega.POLL_LIMIT), (True, True, mega.POLL_LIMIT)):
        subject.driver.check, subject.driver.watch, subject.mega._args.poll_limit = check, watch, limit
        start = time.monotonic()
        with pytest.raises(StepError, match=message) as failed:
            subject.step()
        assert time.monotonic() - start < SECONDS
        assert failed.value.stage in STAGES
        assert failed.value.expected > failed.value.seen
        subject.mega._open_regions()


@pytest.mark.parametrize(("mutant", "message"), CAUGHT, ids=[mutant.bug for mutant, _ in CAUGHT])
def test_a_bug_that_x86_hides_is_caught(mutant, message, subject, expected, put):
    put(mutant)
    start = time.process_time()
    with pytest.raises((DriverError, StepError)) as failed:
        steps_with_checks(subject, expected)
    print(f"seed {subject.driver.seed}, {time.process_time() - start:.1f} s: {failed.value}")
    assert time.process_time() - start < SECONDS
    assert message in str(failed.value)
    assert "missing: " in str(failed.value)
    assert any(re.search(rf"stage {stage}\b", str(failed.value)) for stage in STAGES)


def test_two_regions_in_one_place_are_caught(subject, expected, put):
    put(None)
    subject.mega._args.latent_out = subject.mega._args.latent_query
    with pytest.raises(DriverError, match=r"stage merge task \d+ stores tag 19 where .* stage latent_query"):
        steps_with_checks(subject, expected)


@pytest.mark.parametrize("check", [False, True])
def test_a_region_that_is_too_short_is_reported(check, bench, monkeypatch):
    """Each in turn, by a line of memory or by half of it, with as many rows and positions as it is made for."""
    subject: Bench = bench("glm-5.2-tiny", "bf16", sorted(POSITIONS))
    subject.driver.check = check
    sizes = mega.region_bytes(subject.config, 1, subject.mega.max_pages, subject.mega.blocks, exact=False)
    sizes["tokens_out"] //= mega.MAX_TOKENS  # what a launch of one token uses
    for name, size in sizes.items():
        if name == "next_tokens":  # only a kernel of several tokens has it: test_mega_many.py
            continue
        if name == "error" or (size <= 128 and not check):  # a page's last 128 bytes are only known to the checks
            continue
        short = {**sizes, name: max(size - 128, size // 2)}
        monkeypatch.setattr(mega, "region_bytes", lambda *_, short=short, **__: short)
        subject.remake(3)
        with pytest.raises(DriverError, match=rf"stage [a-z_]+ task \d+ .* past the end of {name}, which has"):
            step_that_uses(subject, name)


def step_that_uses(subject: Bench, region: str) -> None:
    """Some regions are for rows whose tokens are drawn, or penalized."""
    if region not in ("logit_flags", "adjusted"):
        subject.step()
        return
    penalized = Choice(SamplingParams(presence_penalty=1.0), 0, 0, Uses(frozenset({7}), Counter()))
    subject.reset()
    subject.mega.decode(subject.batch(), choices=[penalized] * len(subject.positions))


def test_a_page_that_the_cache_does_not_have_is_refused(bench):
    subject: Bench = bench("glm-5.2-tiny", "bf16", POSITIONS[:3])
    batch = subject.batch()
    table = torch.where(batch.block_table == subject.table[0, 2], subject.cache.pages, batch.block_table)
    with pytest.raises(RequestError, match=r"row 0 is at position \d+ but has no page"):
        subject.mega.decode(StepBatch(batch.tokens, batch.positions, table))


@pytest.mark.parametrize("check", [False, True])
def test_a_cache_that_is_too_short_is_reported(check, bench, monkeypatch):
    """Had nobody compared the page with the cache."""
    subject: Bench = bench("glm-5.2-tiny", "bf16", POSITIONS[:3])
    subject.driver.check = check
    monkeypatch.setattr(StepBatch, "check", lambda *_, **__: None)
    batch = subject.batch()
    table = torch.where(batch.block_table == subject.table[0, 2], subject.cache.pages, batch.block_table)
    with pytest.raises(DriverError, match=r"stage cache_entry task 0 .* past the end of latent_cache\[0\]"):
        subject.mega.decode(StepBatch(batch.tokens, batch.positions, table))
