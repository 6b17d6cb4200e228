"""`rocmega compare` on the CPU target: what is judged, counted and labelled. Nothing asks how long anything took."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from rocmega.compare import Options, arms, measure, plot, run, timing
from rocmega.compare.bandwidth import CHUNK, Bandwidth, ReadKernel
from rocmega.compare.environment import environment
from rocmega.compare.options import parse
from rocmega.compare.report import HEADER, Apart, Report, Row
from rocmega.compare.show import plain
from rocmega.compare.subject import Subject
from rocmega.drivers.host import HostDriver
from rocmega.errors import RequestError
from rocmega.packing import pack_checkpoint
from rocmega.timeline import Task, Timeline

SHARD = Options(
    tp=2,
    rank=1,
    loopback=True,
    layers=4,
    format="bf16",
    rows=(1, 3),
    contexts=(20, 70),
    steps=2,
    rounds=2,
    device="host",
)


@pytest.fixture(scope="module")
def report() -> Report:
    return measure(SHARD)


def test_both_arms_pass_everywhere(report):
    assert [(row.arm, row.rows, row.context) for row in report.rows] == [
        (arm, rows, context) for context in (20, 70) for rows in (1, 3) for arm in ("standard", "mega")
    ]
    for row in report.rows:
        assert row.reason is None, row.reason
        assert row.verdict.reason is None
        assert 0 < row.verdict.worst < 0.01  # bf16 rounds to 2^-9
        assert row.verdict.beaten < 1
        assert row.verdict.judged >= 8
        assert [len(times.device_ms) for times in row.rounds] == [2, 2]


def test_the_mega_task_is_one_launch_and_the_standard_path_many(report):
    counts = {row.arm: row.launches for row in report.rows}
    assert counts["mega"][0] == 1
    assert counts["standard"][0] > 100


def test_bytes_are_those_of_the_rank_and_grow_with_rows_and_context(report):
    sizes = {(row.rows, row.context): row.bytes for row in report.rows}
    assert sizes[1, 20] < sizes[3, 20] < report.about["weight_bytes"]
    # Latents of four layers in bf16, of which at most 24 are selected. Where something is left out, the three layers
    # with an indexer read all keys, and the weights that score them.
    latents, keys, scoring = 4 * 4 * 96 * 2, 3 * 70 * 64 * 2, 3 * (1024 * 128 + 16 * 256) * 2
    assert sizes[1, 70] - sizes[1, 20] == latents + keys + scoring


def test_what_a_figure_may_not_be_quoted_without_is_everywhere(report):
    everything = {"plain": plain(report), "json": json.dumps(report.to_json())}
    for name, text in everything.items():
        for part in ("Rank 1 of 2", "loopback", "random weights", "noise", "say nothing about a GPU"):
            assert part in text, (name, part)


def test_json_holds_every_round(report):
    [row] = [r for r in report.to_json()["rows"] if (r["arm"], r["rows"], r["context"]) == ("mega", 3, 70)]
    medians = [times["device_ms"]["median"] for times in row["rounds"]]
    assert row["ms_per_token"] == min(medians)
    assert row["us_per_layer"] == pytest.approx(min(medians) * 1e3 / 4)
    assert row["share_of_bandwidth"] is None  # nothing was measured to have a share of


def test_published_figures_stand_beside_the_model_that_they_are_of(report):
    assert report.to_json()["published"] == []
    big = dataclasses.replace(report, about={**report.about, "model": "glm-5.2"})
    assert "37.5 / 53.9" in plain(big)
    assert "mega, here" not in plain(big)
    line = Timeline([Task(0, "down", 0, 0, 0.0, 1.0, 6000.0)], ("down",), 1, 4, "us")
    timed = Row("mega", 1, 3000, rounds=[timing.Times((3.0,), (3.0,))])
    apart = Apart(1, 3000, line, [], "", (40.0, 60.0))
    ours = dataclasses.replace(big, rows=[timed], timeline=apart, bandwidth=Bandwidth(4e12, "a way", {}, {}))
    assert "its memory is 2.00 times as fast" in plain(ours)
    assert "20.0 / 30.0" in plain(ours)  # the stamped step took twice as long
    assert "MI355X" in "".join(big.notes())


class _Other(arms.StandardStep):
    """A standard step with a fault."""

    def __init__(self, subject, batch, fault):
        super().__init__(subject.standard(), batch)
        self.fault, self.runs = fault, 0

    def enqueue(self):
        super().enqueue()
        self.runs += 1
        self.output = self.fault(self)


def measure_with(monkeypatch, fault, **options) -> Report:
    monkeypatch.setitem(arms.ARMS, "other", arms.Arm("faulty", lambda s, b: _Other(s, b, fault)))
    return measure(dataclasses.replace(SHARD, rows=(2,), contexts=(20,), arms=("standard", "other"), **options))


def _bad_row(step):
    step.output[1] += 1.0
    return step.output


FAULTS = {
    "a wrong scale": (lambda step: step.output * 1.02, "wrong"),
    "one row": (_bad_row, "wrong"),
    "no number": (lambda step: step.output * float("nan"), "not finite"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_arm_that_is_wrong_gets_no_latency(name, monkeypatch):
    fault, reason = FAULTS[name]
    good, bad = measure_with(monkeypatch, fault).rows
    assert good.ms is not None
    assert reason in bad.reason
    assert bad.ms is None
    assert bad.rounds == []


def test_an_arm_that_takes_other_experts(monkeypatch):
    """Its arithmetic is right for what it chose, and what it chose is wrong."""

    def next_best(subject, batch):
        path = subject.standard()
        route = path._route

        def others(layer, y):
            experts, weights = route(layer, y)
            return (experts + 1) % layer.config.n_routed_experts, weights

        path._route = others
        return arms.StandardStep(path, batch)

    monkeypatch.setitem(arms.ARMS, "other", arms.Arm("faulty", next_best))
    options = dataclasses.replace(SHARD, rows=(2,), contexts=(20,), arms=("standard", "other"))
    good, bad = measure(options).rows
    assert good.ms is not None
    assert "it chose experts or positions that others beat by" in bad.reason
    assert bad.ms is None


def test_an_arm_whose_tokens_change_while_it_is_timed(monkeypatch):
    def fault(step):
        if step.runs > 9:  # judged and counted
            step.best = (step.best + 1) % 8
        return step.output

    _, bad = measure_with(monkeypatch, fault, steps=12).rows
    assert "changed" in bad.reason
    assert bad.ms is None


def test_an_arm_that_raises_is_a_row(monkeypatch):
    def fault(step):
        raise ZeroDivisionError("no luck\n\na page of details")

    report = measure_with(monkeypatch, fault)
    good, bad = report.to_json()["rows"]
    assert good["ms_per_token"] is not None
    assert bad["reason"] == "ZeroDivisionError: no luck"
    assert "a page of details" in bad["details"]
    assert "no luck" in plain(report)


def test_a_graph_on_a_cpu_is_a_reason():
    report = measure(dataclasses.replace(SHARD, rows=(1,), contexts=(20,), arms=("graph",)))
    assert "no graphs" in report.rows[0].reason


def test_without_the_hand_offs_between_ranks():
    """The same sums, in another order of additions."""
    options = dataclasses.replace(SHARD, rows=(1,), contexts=(20,))
    [row] = measure(dataclasses.replace(options, arms=("mega-alone",))).rows
    assert row.reason is None
    assert row.launches[0] == 1
    [row] = measure(Options(layers=1, rows=(1,), contexts=(9,), arms=("mega-alone",), device="host")).rows
    assert "one rank" in row.reason


def test_weights_that_a_cache_holds_are_refused(monkeypatch):
    monkeypatch.setattr(run, "cache_bytes", lambda driver: 10 << 20)
    with pytest.raises(RequestError, match="would not be read from memory"):
        measure(SHARD)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "8"], "--loopback"),
        (["--tp", "8", "--loopback", "--rank", "8"], "rank 8 of 8"),
        (["--rows", "17"], "--rows"),
        (["--arms", "megatask"], "megatask"),
        (["--format", "int8"], "int8"),
        (["--rounds", "0"], "--rounds"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(RequestError, match=message):
        parse(arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "no/such/folder"}, "neither a folder nor"),
        ({"contexts": (5000,)}, "longest context"),
        ({"layers": 9}, "9 layers"),
    ],
)
def test_models_that_cannot_be_had(options, message):
    with pytest.raises(RequestError, match=message):
        Subject.open(dataclasses.replace(SHARD, **options))


def test_a_checkpoint_on_disk(tiny_checkpoint):
    report = measure(Options(model=str(tiny_checkpoint()), rows=(1,), contexts=(30,), steps=1, rounds=1, device="host"))
    assert [row.reason for row in report.rows] == [None, None]
    assert "checkpoint" in report.labels()[0]


def test_a_pack_of_a_rank(tiny_checkpoint, tmp_path):
    pack_checkpoint(tiny_checkpoint(), tmp_path, arch="host", tp=2)
    options = Options(str(tmp_path), 2, 1, True, rows=(1,), contexts=(30,), steps=1, rounds=1, device="host")
    report = measure(options)
    assert [row.reason for row in report.rows] == [None, None]
    assert "pack" in report.labels()[0]


def test_rounds_alternate():
    order = []

    class Noted:
        def __init__(self, name):
            self.enqueue = lambda: order.append(name)

    timing.alternate({"a": Noted("a"), "b": Noted("b")}, torch.device("cpu"), 1, 3)
    assert "".join(order) == "aabb" + "bbaa" + "aabb"  # a warm-up and a timed step each


def test_an_arm_that_fails_while_it_is_timed(monkeypatch):
    def fault(step):
        if step.runs > 9:  # judged and counted
            raise MemoryError("gone")
        return step.output

    good, bad = measure_with(monkeypatch, fault, steps=12).rows
    assert good.ms is not None
    assert bad.reason == "MemoryError: gone"
    assert bad.ms is None


@pytest.mark.parametrize("at", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_quantiles(at):
    values = torch.rand(13, generator=torch.Generator().manual_seed(1)).tolist()
    assert timing.quantile(values, at) == pytest.approx(np.quantile(values, at))


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_read_kernel_reads_every_byte_once(blocks):
    driver = HostDriver()
    data = torch.randint(0, 256, (4 * CHUNK,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    read, sums = ReadKernel(driver).prepare(data, blocks)
    read()
    expected = np.bitwise_xor.reduce(data.numpy().view("uint32"))
    assert np.bitwise_xor.reduce(sums.cpu().numpy().view("uint32"), axis=None) == expected


def test_the_environment_names_what_took_part():
    found = environment(HostDriver())
    assert found["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["arch"] == "host"


def test_a_plot_that_could_not_be_drawn_is_refused_first(tmp_path):
    with pytest.raises(RequestError, match=r"\.png or \.svg"):
        plot.check(tmp_path / "a.pdf")
    with pytest.raises(RequestError, match="folder"):
        plot.check(tmp_path / "none" / "a.png")


@pytest.mark.parametrize("suffix", plot.SUFFIXES)
def test_plot(report, suffix, tmp_path):
    pytest.importorskip("matplotlib")
    source, file = tmp_path / "figures.json", tmp_path / f"figures{suffix}"
    source.write_text(json.dumps(report.to_json()))
    plot.main([str(source), str(file)])
    assert file.stat().st_size > 1000
    if suffix == ".svg":
        assert file.read_text().count("<!-- 1 row -->") == 1


def test_a_plot_of_no_report(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit):
        plot.main([str(tmp_path / "none.json"), str(tmp_path / "a.png")])
    assert "cannot be read" in capsys.readouterr().err


def test_lines_are_as_wide_as_the_header(report):
    for _, lines in report.tables():
        assert all(len(line) == len(HEADER) for line in lines)
