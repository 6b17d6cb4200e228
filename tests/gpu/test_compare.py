"""The comparison on a real GPU: every arm runs, and what is counted and stamped there is what it should be."""

import pytest

from rocmega.compare import Options, measure
from rocmega.compare.report import Report
from rocmega.drivers.select import kind_for

pytestmark = pytest.mark.skipif(kind_for() == "host", reason="needs a GPU")

LAYERS = 4


@pytest.fixture(scope="module")
def report() -> Report:
    """Widths of the published model: its weights are far larger than any cache."""
    arms = ("standard", "graph", "fused", "mega", "mega-alone")
    options = Options("glm-5.2-mid", tp=2, loopback=True, layers=LAYERS, rows=(1, 3), contexts=(100,), arms=arms)
    return measure(Options(**{**vars(options), "steps": 5, "timeline": True}))


def test_every_arm_is_right(report):
    assert {(row.arm, row.rows): row.reason for row in report.rows} == {
        (arm, rows): None for arm in ("standard", "graph", "fused", "mega", "mega-alone") for rows in (1, 3)
    }


def test_the_profiler_sees_one_kernel_of_the_mega_task(report):
    counts = {row.arm: row.launches[0] for row in report.rows if row.launches is not None}
    assert counts["mega"] == counts["mega-alone"] == 1
    assert counts["standard"] > 20 * LAYERS
    assert 5 * LAYERS < counts["fused"] < counts["graph"] <= counts["standard"]


def test_nothing_reads_faster_than_memory_does(report):
    """A share above one would mean that weights came from a cache, or that the bandwidth was measured badly."""
    assert report.bandwidth is not None
    assert 1e12 < report.bandwidth.bytes_per_second < 10e12
    assert report.bandwidth.failed == {}
    for row in report.rows:
        share = report.share(row)
        assert share is not None
        assert 0 < share < 1


def test_stamps_are_microseconds_within_the_step(report):
    apart = report.timeline
    assert apart is not None
    assert apart.timeline.unit == "us"
    assert apart.timeline.truncated == 0
    [mega] = [row for row in report.rows if (row.arm, row.rows) == ("mega", 1)]
    assert mega.ms is not None
    assert 0.5 * mega.ms < apart.timeline.length * 1e-3 < 3 * mega.ms  # stamps cost something
    assert all(0 <= stage.bandwidth < 1.5 for stage in apart.stages if stage.bandwidth is not None)
