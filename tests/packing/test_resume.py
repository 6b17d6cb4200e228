"""Whatever stops packing, the same command goes on from there, to the same bytes."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rocmega.errors import PackError
from rocmega.packing import is_pack, pack_checkpoint, writer
from rocmega.packing.rank import JOURNAL, RankPack
from tests.packing.kit import digests

ROOT = Path(__file__).resolve().parents[2]
PARTIAL = ".rank-0-of-1.partial"


@pytest.fixture(scope="session")
def checkpoint(tiny_checkpoint) -> Path:
    return tiny_checkpoint("glm-5.2-tiny", "mxfp4")


@pytest.fixture(scope="session")
def reference(checkpoint, tmp_path_factory) -> dict[str, str]:
    """The files of a pack that nothing interrupted."""
    out = tmp_path_factory.mktemp("reference")
    pack_checkpoint(checkpoint, out, arch="host")
    return digests(out)


def crash(checkpoint: Path, out: Path, points: list[tuple[str, int]]) -> list[dict]:
    command = [sys.executable, "-m", "tests.packing.crashes", str(checkpoint), str(out), json.dumps(points)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_killed_at_every_kind_of_moment(checkpoint, reference, tmp_path):
    """At calls that change the disk: some while the pack grows, and all when it is finished."""
    whole, finish = (report["calls"] for report in crash(checkpoint, tmp_path / "out", [("any", 0), ("finish", 0)]))
    assert whole > 300
    assert 8 < finish < 40
    points = [("any", number) for number in (1, 3, *range(20, whole - 50, whole // 6))]
    points += [("finish", number) for number in range(1, finish + 1)]
    reports = crash(checkpoint, tmp_path / "out", points)
    assert len(reports) == len(points)
    for report in reports:
        assert report["calls"] == -1
        assert report["found"] == ["rank-0-of-1"]
        assert report["digests"] == reference
        # Nothing, or after the final renaming all of it.
        last = report["phase"] == "finish" and report["number"] == finish
        assert report["after"] == (reference if last else None)
        # Work that had been committed was not done again.
        assert report["phase"] == "any" or report["finished"] < finish + 10


def test_killed_at_any_time(checkpoint, reference, tmp_path):
    """From outside, several times in a row."""
    code = (
        "import time; from rocmega.packing import pack_checkpoint, rank, writer; from pathlib import Path\n"
        "write, writer.COMMIT_BYTES = rank.RankPack.write, 1 << 18\n"
        "rank.RankPack.write = lambda *args: (time.sleep(0.003), write(*args))\n"
        f"print('ready', flush=True); pack_checkpoint(Path({str(checkpoint)!r}), Path('out'), arch='host')\n"
    )
    done = []
    for delay in (0.3, 0.5, 0.4):
        process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert not is_pack(tmp_path / "out")
        journal = tmp_path / "out" / PARTIAL / JOURNAL
        done.append(len(journal.read_bytes().splitlines()) if journal.exists() else 0)
    assert done == sorted(done)
    assert done[-1] > 0
    pack_checkpoint(checkpoint, tmp_path / "out", arch="host")
    assert digests(tmp_path / "out") == reference


@pytest.fixture
def interrupted(checkpoint, tmp_path, monkeypatch) -> Path:
    """A pack whose disk was full after 200 writes."""
    full_after(200, monkeypatch)
    monkeypatch.setattr(writer, "COMMIT_BYTES", 1 << 18)
    with pytest.raises(PackError, match=r"No space left on device.*What is packed so far is kept"):
        pack_checkpoint(checkpoint, tmp_path / "out", arch="host")
    monkeypatch.undo()
    assert (tmp_path / "out" / PARTIAL / JOURNAL).stat().st_size > 0
    return tmp_path / "out"


def full_after(writes: int, monkeypatch) -> None:
    pwrite, left = os.pwrite, [writes]

    def full(*args):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", full)


def test_after_a_full_disk_it_goes_on(interrupted, checkpoint, reference, monkeypatch):
    lines = len((interrupted / PARTIAL / JOURNAL).read_bytes().splitlines())
    jobs = []
    work = writer._Run._work
    monkeypatch.setattr(writer._Run, "_work", lambda run, job, packs: (jobs.append(job), work(run, job, packs))[1])
    seen = []
    pack_checkpoint(checkpoint, interrupted, arch="host", progress=lambda *args: seen.append(args))
    assert digests(interrupted) == reference
    bars = [(done, total) for text, done, total in (args for args in seen if len(args) == 3) if text == "packing"]
    assert len(jobs) == 365 - lines
    assert 0 < bars[0][0] < bars[-1][0] == bars[-1][1]  # what was there already is counted


def test_a_limit_on_file_sizes(checkpoint, reference, tmp_path):
    """The system's own refusal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        with pytest.raises(PackError, match=r"cannot grow \(File too large\)"):
            pack_checkpoint(checkpoint, tmp_path, arch="host")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not is_pack(tmp_path)
    pack_checkpoint(checkpoint, tmp_path, arch="host")
    assert digests(tmp_path) == reference


def test_a_disk_that_is_too_small_is_noticed_at_once(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 * 10**6))
    monkeypatch.setattr(writer._Run, "_all_jobs", lambda run: pytest.fail("began all the same"))
    with pytest.raises(PackError, match=r"has 0.0 GB free and the pack needs 0.0 GB more"):
        pack_checkpoint(checkpoint, tmp_path, arch="host")


def test_nothing_is_continued_for_another_pack(interrupted, checkpoint, tiny_checkpoint):
    with pytest.raises(PackError, match=r"partial is another pack .*: architecture gfx942 is asked for and host is"):
        pack_checkpoint(checkpoint, interrupted, arch="gfx942")
    with pytest.raises(PackError, match="partial is another pack"):
        pack_checkpoint(tiny_checkpoint("glm-5.2-tiny", "fp8"), interrupted, arch="host")


def test_a_torn_journal_line_is_forgotten(interrupted, checkpoint, reference):
    journal = interrupted / PARTIAL / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-7])
    pack_checkpoint(checkpoint, interrupted, arch="host")
    assert digests(interrupted) == reference


def test_two_at_a_time(checkpoint, interrupted):
    from rocmega.checkpoint import Checkpoint
    from rocmega.models.glm.config import from_dir
    from rocmega.models.glm.weights import plan_of
    from rocmega.packing.manifest import identity
    from rocmega.packing.source import fingerprint
    from rocmega.registry import read_config

    opened = Checkpoint(checkpoint)
    plan = plan_of(opened, from_dir(checkpoint), arch="host")
    base = identity(plan, 0, "glm_moe_dsa", read_config(checkpoint), fingerprint(opened))
    with (
        RankPack(interrupted, plan, base, []),
        pytest.raises(PackError, match="is being written by another process"),
    ):
        pack_checkpoint(checkpoint, interrupted, arch="host")
    pack_checkpoint(checkpoint, interrupted, arch="host")


def test_a_checkpoint_that_turns_out_damaged_halfway(tiny_checkpoint, tmp_path):
    """Its good parts are kept, and with the file mended packing goes on."""
    source = Path(shutil.copytree(tiny_checkpoint("glm-5.2-tiny", "fp8"), tmp_path / "checkpoint"))
    from rocmega.checkpoint import Checkpoint
    from rocmega.errors import CheckpointError

    name = "model.layers.6.self_attn.q_b_proj.weight"
    info, file = Checkpoint(source).info(name), Checkpoint(source).file(name)
    good = file.read_bytes()
    bad = bytearray(good)
    bad[info.offset + 5000] = 0x7F
    file.write_bytes(bad)
    with pytest.raises(CheckpointError, match=rf"{name} holds a NaN"):
        pack_checkpoint(source, tmp_path / "out", arch="host")
    assert not is_pack(tmp_path / "out")
    file.write_bytes(good)
    pack_checkpoint(source, tmp_path / "out", arch="host")
    pack_checkpoint(source, tmp_path / "fresh", arch="host")
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")
