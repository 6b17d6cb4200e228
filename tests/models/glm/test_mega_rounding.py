"""Whole steps with rounded activations by both paths.

The paths add in different orders, so a value that lies next to the middle between two numbers of bf16 or e4m3 may be
rounded up by one and down by the other. That is the only difference, which is shown by taking it away: when the
standard path rounds as the mega-task did, the logits agree like those of float32. Left alone, one turned value moves
everything behind it by some 1e-4, which turns more: rows in which that happens end up to 2e-2 apart, the others 1e-7.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from rocmega.models.common.products import Products
from rocmega.models.glm import formulas, stages, standard
from rocmega.models.glm.standard import StandardPath
from tests.models.driven import recorded
from tests.models.glm.recording import LayerView, Recording
from tests.models.glm.test_mega_stages import (
    ROWS_OF,
    SAME_ROUNDING,
    SAME_ROUNDING_OF_ATTEND,
    in_cache,
)

# Eight layers of attention and eight stages more, if all their differences added up in the same direction.
SAME_ROUNDING_OF_STEP = 8 * (SAME_ROUNDING_OF_ATTEND + 8 * SAME_ROUNDING)


@pytest.fixture(scope="module", params=["fp8", "mxfp4"])
def recording(request, bench) -> Recording:
    subject = bench("glm-5.2-tiny", request.param, ROWS_OF["glm-5.2-tiny"], activations="fp8")
    subject.remake(blocks=3, mega_tasks=subject.config.num_hidden_layers)
    return Recording(subject)


def rounded_values(view: LayerView, layer) -> Iterator[torch.Tensor]:
    """All that the mega-task rounds in a layer, as it was before, [..., width]."""
    c = view.config
    nope, rope = view.query.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
    yield layer.attention_norm(view.x_in).values
    yield view.q_normed.values
    if view.scored:
        yield view.index_query
    yield from (nope, torch.cat([view.latent_query, rope], dim=-1), view.latent_out, view.attention_out.flatten(-2))
    yield layer.mlp_norm(view.x_mid).values
    yield (
        view.middle(1, c.intermediate_size)
        if layer.dense
        else view.middle(c.num_experts_per_tok + 1, c.moe_intermediate_size)
    )


class AsTheMegaTask:
    """In place of the standard path's rounding: rounds the mega-task's row that is nearest to each.

    Fields:
        farthest: relative L2 of a row and the one taken for it.
        turned, values: how many numbers would have been rounded otherwise, of how many.
    """

    def __init__(self, recording: Recording, products: Products):
        self.round, self.farthest, self.turned, self.values = products.round, 0.0, 0, 0
        found: dict[int, list[torch.Tensor]] = {}
        for view, layer in zip(recording.layers(), recording.stages(exact=False), strict=True):
            for values in rounded_values(view, layer):
                found.setdefault(values.shape[-1], []).append(values.flatten(0, -2))
        weights = recording.bench.weights
        last = formulas.deferred_rms_norm(view.x_out, weights.final_norm, recording.config.rms_norm_eps).values
        found[last.shape[-1]].append(last)
        self.known = {width: torch.cat(rows).double() for width, rows in found.items()}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, known = x.flatten(0, -2), self.known[x.shape[-1]]
        apart = torch.cdist(rows.double(), known, compute_mode="donot_use_mm_for_euclid_dist")
        nearest = known[apart.argmin(1)].float()
        self.farthest = max(self.farthest, float((apart.amin(1) / nearest.norm(dim=1)).max()))
        self.turned += int((self.round(rows) != self.round(nearest)).sum())
        self.values += rows.numel()
        return self.round(nearest).view_as(x)


def test_with_the_same_roundings_the_paths_agree(recording, monkeypatch):
    bench, products = recording.bench, recording.bench.standard.products
    rounding, written = AsTheMegaTask(recording, products), standard._write
    theirs = {pool.data_ptr(): kept for pools, kept in zip(recording._pools(), recording.pools, strict=True)
              for pool, kept in zip(pools, kept, strict=True) if pool is not None}  # fmt: skip

    def write(pool, slots, entries):
        entry, near = in_cache(
            theirs[pool.data_ptr()].flatten(0, 1)[slots[:, 0]], entries[:, 0], bench.standard.layers[0]
        )
        torch.testing.assert_close(entry, near, rtol=SAME_ROUNDING_OF_STEP, atol=0)
        written(pool, slots, entry[:, None])

    monkeypatch.setattr(products, "round", rounding)
    monkeypatch.setattr(products, "head", lambda x, weight: F.linear(rounding(x.values), weight) * x.scale)
    monkeypatch.setattr(standard, "_write", write)
    logits = bench.standard_step().logits
    off = (recording.outcome.logits - logits).norm(dim=1) / logits.norm(dim=1)
    print(
        f"{rounding.turned} of {rounding.values} turned; inputs {rounding.farthest:.1e}, logits {off.max():.1e} apart"
    )
    assert rounding.farthest < 2**-8 + SAME_ROUNDING_OF_STEP  # the mega-task has rounded them to bf16 already
    assert rounding.turned < 1e-3 * rounding.values
    assert off.max() < SAME_ROUNDING_OF_STEP


def weighed(experts: torch.Tensor, scores: torch.Tensor, bias, topk: int, factor: float):
    """As `formulas.route`, of experts that somebody else chose."""
    weights = scores.gather(1, experts)
    return experts, weights / (weights.sum(-1, keepdim=True) + 1e-20) * factor


def test_left_alone_they_are_no_farther_apart_than_two_roundings(recording, monkeypatch):
    """Each is its rounding away from exact activations; if the roundings were independent, sqrt(2) times that apart."""
    bench = recording.bench
    selections, routes = [], []
    with monkeypatch.context() as patch:
        patch.setattr(standard, "select", recorded(formulas.select, selections))
        patch.setattr(stages, "route", recorded(formulas.route, routes))
        rounded = bench.standard_step().logits
    same = recording.same_choices(selections, routes)
    monkeypatch.setattr(standard, "select", lambda *_: selections.pop(0))
    monkeypatch.setattr(stages, "route", lambda *args: weighed(routes.pop(0)[0], *args))
    bench.reset()
    exact = StandardPath(bench.config, bench.weights, bench.cache, activations="f32").decode(bench.batch())
    assert not selections
    assert not routes
    apart = (recording.outcome.logits - rounded).norm(dim=1) / exact.norm(dim=1)
    off = (rounded - exact).norm(dim=1) / exact.norm(dim=1)
    print(f"{int(same.sum())} rows chose the same: {apart[same].max():.1e} apart, of {off[same].min():.1e} and more")
    assert same.sum() > recording.rows // 2
    assert (apart <= 2**0.5 * off)[same].all()
