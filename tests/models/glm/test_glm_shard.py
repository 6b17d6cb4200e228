"""Ranks of a model without its checkpoint: shapes, formats and values of random weights."""

import math

import pytest
import torch

from rocmega.checkpoint.tiles import PackedMatrix, scaled, unpack_tiles
from rocmega.errors import ConfigError, RequestError
from rocmega.models.common.products import Products
from rocmega.models.common.random_weights import _fill, random_fields
from rocmega.models.glm import kernel, presets, shard
from rocmega.models.glm.config import from_dict
from rocmega.models.glm.plan import plan
from rocmega.models.glm.stages import LayerStages
from rocmega.models.glm.weights import Formats, assemble

TINY = from_dict(presets.preset("glm-5.2-tiny"))
FORMATS = {
    "f32": Formats("f32", "f32"),
    "bf16": Formats("bf16", "bf16"),
    "fp8": Formats("fp8", "bf16"),
    "mxfp4": Formats("fp8", "bf16", "mxfp4"),
}


def test_a_rank_of_the_published_model_is_a_model():
    config = from_dict(presets.preset("glm-5.2"))
    part = shard.rank_config(config, 8)
    assert kernel.Shape.of(part) == kernel.Shape.of(config, 8)
    assert part.hidden_size == config.hidden_size


def test_ranks_that_cannot_share_the_model():
    with pytest.raises(ConfigError, match="num_attention_heads 4"):
        shard.rank_config(TINY, 3)


def test_the_first_layers():
    config = shard.first_layers(TINY, 3)
    assert (config.num_hidden_layers, config.dense_layers, config.full_index) == (
        3, TINY.dense_layers[:3], TINY.full_index[:3],
    )  # fmt: skip
    for layers in (0, TINY.num_hidden_layers + 1):
        with pytest.raises(RequestError, match="layers"):
            shard.first_layers(TINY, layers)


def fields_of(formats: Formats, tp: int = 1, arch: str | None = None, **options):
    todo = plan(TINY, formats, tp=tp, arch=arch)
    return todo, random_fields(todo, TINY.num_hidden_layers, **options)


def stored(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [value.tiles] if value.scales is None else [value.tiles, value.scales]


@pytest.mark.parametrize("arch", ["host", "gfx942"])
@pytest.mark.parametrize("format", FORMATS)
def test_values_are_what_a_checkpoint_could_have_given(format, arch):
    todo, made = fields_of(FORMATS[format], tp=2, arch=arch)
    assert list(made) == list(todo.fields)
    for name, field in todo.fields.items():
        value = made[name]
        assert sum(tensor.nbytes for tensor in stored(value)) == field.bytes(), name
        if isinstance(value, PackedMatrix):
            values, bits = value.dequantize(), value.tiles
            if value.format.endswith("fnuz"):
                assert not (bits == 0x80).any()
            wanted = 1 / math.sqrt(value.k)
            wanted *= {"head": 4, "router": 2, "o": 0.25, "down": 0.25}.get(name.rsplit(".", 1)[-1], 1)
            assert values.isfinite().all(), name
            assert values.square().mean().sqrt() == pytest.approx(wanted, rel=0.25 if value.scales is not None else 0.1)


@pytest.mark.parametrize("format", FORMATS)
def test_padding_is_zero(format):
    matrix = PackedMatrix.empty(FORMATS[format].expert, (24, 96), 3)
    _fill(matrix, 1.0, torch.Generator().manual_seed(1))
    rows, columns = matrix.tiles.shape[1] * 16, matrix.tiles.shape[2] * matrix.tiles.shape[3] // 16
    whole = unpack_tiles(matrix.tiles, "fp8", rows, columns).view(torch.uint8)  # as plain bytes
    bytes_of_a_row = matrix.dequantize().shape[-1] * {"f32": 4, "bf16": 2, "fp8": 1, "mxfp4": 0.5}[matrix.format]
    assert whole[:, :24, : int(bytes_of_a_row)].any()
    assert not whole[:, 24:].any()
    assert not whole[:, :, int(bytes_of_a_row) :].any()


def test_the_seed_and_the_rank_decide():
    _, first = fields_of(FORMATS["fp8"], tp=2)
    todo, again = fields_of(FORMATS["fp8"], tp=2)
    _, other_seed = fields_of(FORMATS["fp8"], tp=2, seed=1)
    _, other_rank = fields_of(FORMATS["fp8"], tp=2, rank=1)

    def same(a, b) -> bool:
        return all(torch.equal(x, y) for x, y in zip(stored(a), stored(b), strict=True))

    for name, field in todo.fields.items():
        assert same(first[name], again[name]), name
        assert not same(first[name], other_seed[name]), name
        assert same(first[name], other_rank[name]) is not field.split, name


@pytest.mark.parametrize("activations", ["bf16", "fp8", "f32"])
@pytest.mark.parametrize("format", FORMATS)
def test_gathered_experts_are_the_experts(format, activations):
    todo, made = fields_of(FORMATS[format])
    weights = assemble(todo.formats, TINY, made)
    layer = TINY.dense_layers.index(False)
    products = Products(weights.formats, torch.device("cpu"), activations)
    by_expert, gathered = (
        LayerStages(TINY, layer, weights.layers[layer], products, resident) for resident in (True, False)
    )
    y = by_expert.mlp_norm(torch.randn(5, TINY.hidden_size, generator=torch.Generator().manual_seed(1)))
    chosen = by_expert.route(by_expert.router_logits(y))
    expected, actual = by_expert.experts(y, *chosen), gathered.experts(y, *chosen)
    # The same roundings; float32 sums in another order, which may move a value over a border of bf16 or e4m3.
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=expected.abs().max() * (1e-6 if activations == "f32" else 1e-3)
    )


def test_more_rows_than_are_gathered_go_by_expert():
    todo, made = fields_of(FORMATS["f32"])
    weights = assemble(todo.formats, TINY, made)
    layer = TINY.dense_layers.index(False)
    stages = LayerStages(TINY, layer, weights.layers[layer], Products(weights.formats, torch.device("cpu")), False)
    y = stages.mlp_norm(torch.randn(40, TINY.hidden_size, generator=torch.Generator().manual_seed(1)))
    experts, factors = stages.route(stages.router_logits(y))
    few = torch.cat([stages.experts(y[part], experts[part], factors[part]) for part in (slice(0, 20), slice(20, 40))])
    torch.testing.assert_close(stages.experts(y, experts, factors), few)


def test_only_float32_activations_are_not_rounded():
    for formats in FORMATS.values():
        exact = Products(formats, torch.device("cpu"), "f32")
        assert not exact.rounded
        assert not exact.rounded_head
        x = torch.randn(3, TINY.hidden_size)
        assert torch.equal(exact.round(x), x)


@pytest.mark.parametrize("format", FORMATS)
def test_a_rank_alone_adds_its_share_for_everybody(format):
    todo, made = fields_of(FORMATS[format], tp=2)
    rank = assemble(todo.formats, TINY, made, 2, 1)
    own = shard.alone(rank)
    assert (own.tp, own.rank) == (1, 0)
    assert shard.alone(own) is own
    for mine, layer in zip(own.layers, rank.layers, strict=True):
        for name, value in layer.items():
            if name in ("o", "down"):
                assert torch.equal(mine[name].dequantize(), 2 * value.dequantize())
            else:
                assert mine[name] is value


def test_mxfp4_has_no_scales_for_three_ranks():
    with pytest.raises(RequestError, match="powers of two"):
        scaled(PackedMatrix.empty("mxfp4", (16, 128)), 3)


def test_equal_shares_are_as_large_together_as_one():
    todo = plan(TINY, FORMATS["bf16"], tp=2)
    one, four = (random_fields(todo, TINY.num_hidden_layers, shares=shares) for shares in (1, 4))
    for name in todo.fields:
        if isinstance(one[name], PackedMatrix):
            ratio = one[name].dequantize().std() / four[name].dequantize().std()
            assert ratio == pytest.approx(4 if name.endswith((".o", ".down")) else 1, rel=1e-2)
