"""Every stage of every layer on the stage's own input, as it stood in the hand-off regions, against its formula.

Two formulas each. One rounds activations where the kernel does: what is left are sums in another order, whatever the
weights' format. The other is float32 throughout, with dequantized weights: it says what the rounding costs, and that
the first does not round more than it should.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from rocmega import descriptor
from rocmega.models.glm import formulas, kernel, stages, standard
from rocmega.models.glm.stages import LayerStages
from tests.models.driven import recorded
from tests.models.glm.kit import POSITIONS, Bench
from tests.models.glm.recording import LayerView, Recording

MODELS = [("glm-5-tiny", "f32"), *(("glm-5.2-tiny", dtype) for dtype in ("f32", "bf16", "fp8", "mxfp4")),
          *(("odd", dtype) for dtype in ("f32", "bf16", "fp8"))]  # fmt: skip
# Rows on both sides of index_topk: 24, and 100 in the odd model.
ROWS_OF = {"odd": (150, 5, 98, 99, 100, 0, 63, 64, 599), "glm-5-tiny": POSITIONS[:5], "glm-5.2-tiny": POSITIONS[:9]}

# Relative L2 of each row. Of attention's probabilities the bf16 and FP8 models keep two bf16, 17 bits.
SAME_ROUNDING, SAME_ROUNDING_OF_ATTEND = 2e-6, 1e-5
# Rounding to bf16 is an error of 2^-9, 0.2 %, of a row, and sums of products with random signs do not enlarge it; gate
# times up has it twice, and once more as what is published. Attention's scores are exponents: there an absolute error
# becomes a relative one.
NO_ROUNDING, NO_ROUNDING_OF_ATTEND = 3 * 2**-9, 2e-2

Check = Callable[[LayerView, LayerStages], Iterator[tuple[torch.Tensor, torch.Tensor]]]  # (kernel's, formula's)
CHECKS: dict[str, Check] = {}


def stage(check: Check) -> Check:
    CHECKS[check.__name__] = check
    return check


@stage
def embed(view, layer):
    """By what is left of it when the first launch ends: it has attention's output added."""
    if view.number == 0:
        yield view.x_mid - layer.output_projection(view.attention_out), view.x_in


@stage
def down(view, layer):
    q_a, kv_a, index_k, _ = layer.down_projections(layer.attention_norm(view.x_in))
    q = layer.query_norm(q_a)
    yield rounded(view.q_normed.values, q.values, layer)
    yield view.q_normed.scale, q.scale
    yield view.kv_a, kv_a
    if view.full_index:
        yield view.index_k, index_k


@stage
def index_weights(view, layer):
    if view.scored:
        weights = layer.down_projections(layer.attention_norm(view.x_in))[3]
        yield view.index_weights, layer.index_head_weights(weights)


@stage
def cache_entry(view, layer):
    pages, places = view.bench.slots()
    yield in_cache(view.latent_pool[pages, places], layer.latent_entry(view.kv_a, view.angles), layer)
    if view.full_index:
        yield in_cache(view.index_pool[pages, places], layer.index_entry(view.index_k, view.angles), layer)


def in_cache(entry: torch.Tensor, formula: torch.Tensor, layer: LayerStages) -> tuple[torch.Tensor, torch.Tensor]:
    return rounded(entry.to(torch.float32), formula, layer, entry.dtype)


def rounded(ours: torch.Tensor, formula: torch.Tensor, layer: LayerStages, dtype: torch.dtype = torch.bfloat16):
    """Where the kernel rounds what it gives: of what ours may be, the nearest. It is the rounding of something very
    near the formula.
    """
    if not layer.products.rounded:
        return ours, formula
    near = SAME_ROUNDING * formula.abs().flatten(1).amax(1).view(-1, *[1] * (formula.dim() - 1))
    low, high = ((formula + sign * near).to(dtype).to(torch.float32) for sign in (-1, 1))
    return ours, ours.clamp(low, high)


@stage
def query(view, layer):
    yield rounded(view.query, torch.cat(layer.queries(view.q_normed, view.angles), dim=-1), layer)
    if view.scored:
        yield rounded(view.index_query, layer.index_queries(view.q_normed, view.angles), layer)


@stage
def index_scores(view, layer):
    if not view.scored:
        return
    queries = layer.products.round(view.index_query)
    for row in view.long.nonzero()[:, 0].tolist():
        count = int(view.positions[row]) + 1
        keys = view.cached(view.index_pool, row, torch.arange(count))
        scores = formulas.index_scores(
            queries[row][None, None], keys[None], view.index_weights[row][None, None], view.config.index_scale
        )
        yield view.index_scores[row, None, :count], scores[0]


@stage
def select(view, layer):
    """Exactly: from the kernel's own scores, ties to the lowest position."""
    if not view.scored:
        return
    rows, topk = view.long.nonzero()[:, 0], view.config.index_topk
    for row in rows.tolist():
        scores = view.index_scores[row, : view.positions[row] + 1]
        chosen, valid = formulas.select(scores[None, None], view.positions[row][None, None], topk)
        assert valid.all()
        assert torch.equal(view.selection[row], chosen[0, 0])
        yield view.selection[row, None], chosen[0]


@stage
def latent_query(view, layer):
    nope = view.query[..., : view.config.qk_nope_head_dim]
    yield rounded(view.latent_query, layer.latent_query(nope), layer)


@stage
def attend(view, layer):
    c = view.config
    queries = layer.attention_query(view.latent_query, view.query[..., c.qk_nope_head_dim :])
    outs, stats = view.partials()
    for row in range(view.rows):
        for split, positions in enumerate(view.attended(row).split(kernel.SPLIT)):
            entries = view.cached(view.latent_pool, row, positions)[None]
            seen = torch.ones(1, 1, len(positions), dtype=torch.bool)
            out, maximum, total = formulas.attention_partial(
                queries[row][None], entries, seen, c.softmax_scale, c.kv_lora_rank
            )
            yield outs[row, split], out[0]
            yield stats[row, split], torch.stack([maximum[0], total[0]], dim=-1)


@stage
def merge(view, layer):
    outs, stats = view.partials()
    for row in range(view.rows):
        splits = -(-len(view.attended(row)) // kernel.SPLIT)
        merged = formulas.merge_partials(outs[row, :splits], stats[row, :splits, :, 0], stats[row, :splits, :, 1])
        yield rounded(view.latent_out[row, None], merged[None], layer)


@stage
def value_up(view, layer):
    yield rounded(view.attention_out, layer.value_up(view.latent_out), layer)


@stage
def output(view, layer):
    yield view.x_mid - view.x_in, layer.output_projection(view.attention_out)
    normed = layer.mlp_norm(view.x_mid)
    yield rounded(view.x_normed(1).values, normed.values, layer)
    yield view.x_normed(1).scale, normed.scale


@stage
def router(view, layer):
    if not layer.dense:
        yield view.router_logits, layer.router_logits(layer.mlp_norm(view.x_mid))


@stage
def gate_up(view, layer):
    c, normed = view.config, layer.mlp_norm(view.x_mid)
    if layer.dense:
        yield rounded(view.middle(1, c.intermediate_size)[:, 0], layer.expert_middle(normed), layer)
        return
    middle = view.middle(c.num_experts_per_tok + 1, c.moe_intermediate_size)
    yield rounded(middle[:, -1], layer.expert_middle(normed, c.n_routed_experts), layer)
    experts, weights = view.ranked_experts(layer)
    for row in range(view.rows):
        for place, expert in enumerate(experts[row].tolist()):
            # That it is this expert's output is the check of the choice: another's has nothing in common with it.
            formula = layer.expert_middle(normed[row], expert, weights[row, place])[None]
            yield rounded(middle[row, None, place], formula, layer)


@stage
def down_sum(view, layer):
    c = view.config
    if layer.dense:
        expected = layer.expert_down(view.middle(1, c.intermediate_size)[:, 0])
    else:
        middle = view.middle(c.num_experts_per_tok + 1, c.moe_intermediate_size)
        expected = layer.expert_down(middle[:, -1], c.n_routed_experts)
        experts, _ = view.ranked_experts(layer)
        for row in range(view.rows):
            for place, expert in enumerate(experts[row].tolist()):
                expected[row] += layer.expert_down(middle[row, place], expert)
    yield view.x_out - view.x_mid, expected


@stage
def head(view, layer):
    if view.number != view.config.num_hidden_layers - 1:
        return
    weights, products = view.bench.weights, layer.products
    normed = formulas.deferred_rms_norm(view.x_out, weights.final_norm, view.config.rms_norm_eps)
    yield view.recording.outcome.logits, products.head(normed, weights.head.dequantize())


@stage
def sample(view, layer):
    logits, tokens = view.recording.outcome.logits, view.recording.outcome.tokens
    assert tokens.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]
    yield tokens[:, None], logits.argmax(-1)[:, None]


@pytest.fixture(scope="module")
def recording(bench) -> Callable[..., Recording]:
    @cache
    def record(name: str, dtype: str) -> Recording:
        subject: Bench = bench(name, dtype, ROWS_OF[name])
        subject.remake(blocks=3, mega_tasks=subject.config.num_hidden_layers)
        return Recording(subject)

    return record


def errors(recording: Recording, check: Check, *, exact: bool) -> list[float]:
    """Relative L2 of every row of every comparison."""
    found = []
    for view, layer in zip(recording.layers(), recording.stages(exact=exact), strict=True):
        for ours, theirs in check(view, layer):
            assert ours.shape == theirs.shape
            difference = (ours.double() - theirs.double()).flatten(1).norm(dim=1)
            found += (difference / theirs.double().flatten(1).norm(dim=1)).tolist()
    return found


def test_no_stage_is_forgotten():
    names = descriptor.load(kernel.FOLDER / "stages.h").enums["Stage"]
    of_ranks = {"reduce"}  # tests/parallel/test_reduce.py and test_mega_ranks.py
    assert {name.lower() for name in names} == set(CHECKS) | of_ranks


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(("model", "dtype"), MODELS)
def test_stage_is_its_formula(name, model, dtype, recording):
    same, none = (errors(recording(model, dtype), CHECKS[name], exact=exact) for exact in (False, True))
    assert same
    print(f"{model} {dtype} {name}: {max(same):.1e} with the same rounding, {max(none):.1e} with none")
    attend = name == "attend"
    assert max(same) <= (SAME_ROUNDING_OF_ATTEND if attend and dtype != "f32" else SAME_ROUNDING)
    assert max(none) <= (SAME_ROUNDING if dtype == "f32" else NO_ROUNDING_OF_ATTEND if attend else NO_ROUNDING)


@pytest.mark.parametrize(("model", "dtype"), MODELS)
def test_the_whole_step_is_the_standard_paths(model, dtype, recording, monkeypatch):
    """Choices of positions and experts too, in float32. With rounding a sum in another order may round a value the
    other way, which is soon as much as all rounding together and now and then turns a choice over: then the row is
    another.
    """
    subject = recording(model, dtype)
    selections, routes = [], []
    with monkeypatch.context() as patch:
        patch.setattr(standard, "select", recorded(formulas.select, selections))
        patch.setattr(stages, "route", recorded(formulas.route, routes))
        logits = subject.bench.standard_step().logits
    agree = subject.same_choices(selections, routes)
    if dtype == "f32":
        assert agree.all()
        torch.testing.assert_close(subject.outcome.logits, logits, atol=1e-4, rtol=0)
    else:
        assert agree.sum() > subject.rows // 2
        assert ((subject.outcome.logits - logits).norm(dim=1) / logits.norm(dim=1))[agree].max() < 2e-2


@pytest.mark.parametrize(("model", "dtype"), MODELS)
def test_only_the_written_slots_of_the_caches_change(model, dtype, recording):
    subject = recording(model, dtype)
    pages, places = subject.bench.slots()
    pools = [pool for pair in zip(*subject.pools, strict=True) for pool in pair if pool is not None]
    assert len(pools) == len(subject.bench.noise)
    for pool, noise in zip(pools, subject.bench.noise, strict=True):
        assert (pool[pages, places] != noise[pages, places]).any(dim=1).all()
        pool = pool.clone()
        pool[pages, places] = noise[pages, places]
        assert torch.equal(pool.view(torch.uint8), noise.view(torch.uint8))
