from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocmega.policy import (
    MEGA_FAMILIES,
    MEGA_FORMATS,
    MEGA_ROWS,
    MEGA_TARGETS,
    NOT_LOADED,
    Measured,
    StepShape,
    choose,
    nearest,
)

SHAPE = StepShape(
    family="glm_moe_dsa", format="f32", target="host", rows=3, context=100, max_rows=16, max_model_len=4096
)
DENIED = {
    "family": ("family", "llama"),
    "format": ("format", "int4"),
    "target": ("target", "none"),
    "no rows": ("rows", 0),
    "too many rows": ("rows", 17),
    "context": ("context", 4097),
    "prefill": ("tokens_per_row", 2),
    "feature": ("features", frozenset({"greedy", "no_such_feature"})),
    "missing": ("missing", ("no compiler",)),
    "measured": ("measured", (Measured(4, 4096, 2.5, 1.5),)),
}


def test_what_is_supported_runs_as_mega_task():
    assert choose(SHAPE).path == "mega"
    assert choose(SHAPE).reasons == ()


@pytest.mark.parametrize("name", DENIED)
def test_anything_else_is_denied_with_its_reason(name):
    field, value = DENIED[name]
    decision = choose(replace(SHAPE, **{field: value}))
    assert decision.path == "standard"
    assert len(decision.reasons) == 1
    named = (
        "2.5 ms, and 1.5 ms" if name == "measured" else value if isinstance(value, (str, int)) else sorted(value)[-1]
    )
    assert str(named) in decision.reasons[0]


def test_all_reasons_are_listed():
    denied = dict(DENIED.values())
    assert len(choose(replace(SHAPE, **denied)).reasons) == len(denied)


def test_ranks_draw_too():
    assert choose(replace(SHAPE, ranks=8)).path == "mega"
    assert choose(replace(SHAPE, ranks=8, features=frozenset({"sampling"}))).path == "mega"


def test_more_rows_than_configured():
    assert choose(replace(SHAPE, max_rows=2)).path == "standard"
    assert choose(replace(SHAPE, rows=2, max_rows=2)).path == "mega"


@given(
    family=st.sampled_from(["glm_moe_dsa", "other"]),
    format=st.sampled_from(["f32", "bf16", "fp8", "mxfp4"]),
    target=st.sampled_from(["host", "gfx942", "gfx950", "sm_90", "gfx1100"]),
    rows=st.integers(0, 20),
    context=st.integers(0, 5000),
    tokens_per_row=st.integers(1, 3),
)
def test_mega_only_if_every_condition_holds(**fields):
    shape = replace(SHAPE, **fields)
    decision = choose(shape)
    supported = (
        shape.family in MEGA_FAMILIES
        and shape.format in MEGA_FORMATS
        and shape.target in MEGA_TARGETS
        and 1 <= shape.rows <= MEGA_ROWS
        and 1 <= shape.context <= shape.max_model_len
        and shape.tokens_per_row == 1
    )
    assert (decision.path == "mega") == supported == (not decision.reasons)


@pytest.mark.parametrize(
    ("rows", "context", "cell"),
    [
        (1, 1, (1, 100)),
        (2, 100, (4, 100)),
        (4, 101, (4, 900)),
        (9, 50, (4, 100)),
        (1, 5000, (1, 900)),
        (9, 5000, (4, 900)),
    ],
)
def test_the_next_larger_measurement_stands_for_a_step(rows, context, cell):
    measured = [Measured(count, length, 1.0, 2.0) for length in (900, 100) for count in (4, 1)]
    found = nearest(measured, rows, context)
    assert (found.rows, found.context) == cell
    assert nearest([], rows, context) is None


FUSED = replace(SHAPE, target="sm_90", format="fp8", fused_missing=())
NO_MEGA = replace(FUSED, missing=("no compiler",))


def test_the_fused_path_is_for_what_the_mega_task_cannot_run():
    assert choose(FUSED).path == "mega"
    decision = choose(NO_MEGA)
    assert (decision.path, decision.reasons, decision.fused_reasons) == ("fused", ("no compiler",), ())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fused_missing", NOT_LOADED),
        ("family", "deepseek_v4"),
        ("format", "int4"),
        ("target", "host"),
        ("activations", "fp8"),
        ("features", frozenset({"no_such_feature"})),
        ("tokens_per_row", 2),
        ("rows", 17),
        ("context", 4097),
        ("ranks", 2),
    ],
)
def test_the_fused_path_denies_by_default(field, value):
    decision = choose(replace(NO_MEGA, **{field: value}))
    assert decision.path == "standard"
    assert len(decision.fused_reasons) == 1
    named = value if isinstance(value, (str, int)) else sorted(value)[0]
    assert str(named) in decision.fused_reasons[0]


@given(st.tuples(*[st.sampled_from([1.0, 2.0, 3.0])] * 3), st.booleans(), st.booleans())
def test_the_fastest_of_those_that_can_run_it(times, mega, fused):
    """Of equals the first."""
    cell = Measured(16, 4096, times[0], times[2], times[1])
    shape = replace(FUSED, measured=(cell,), missing=() if mega else ("m",), fused_missing=() if fused else ("f",))
    able = [path for path, can in (("mega", mega), ("fused", fused), ("standard", True)) if can]
    decision = choose(shape)
    assert decision.path == min(able, key=cell.ms)
    assert bool(decision.reasons) == (decision.path != "mega")
    assert bool(decision.fused_reasons) == (decision.path == "standard")


def test_what_was_not_measured_stands_by_its_order():
    assert choose(replace(FUSED, measured=(Measured(16, 4096, 1.0, 2.0),))).path == "mega"
    assert choose(replace(NO_MEGA, measured=(Measured(16, 4096, 1.0, 2.0),))).path == "fused"
