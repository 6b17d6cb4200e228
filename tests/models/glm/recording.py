"""One step of the mega-task with a launch per layer, every hand-off region kept: what each stage read and wrote."""

from __future__ import annotations

from functools import cached_property

import torch

from rocmega.models.common.products import Products
from rocmega.models.glm.formulas import Normed, rope_angles
from rocmega.models.glm.kernel import ROWS, TILE_ROWS, router_slices
from rocmega.models.glm.stages import LayerStages
from rocmega.models.glm.weights import Formats
from tests.models.glm.kit import Bench, Outcome


class Recording:
    """A step of all rows of a bench whose mega-task has a launch per layer."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.config, self.rows = bench, bench.config, len(bench.positions)
        self.snapshots: list[dict[str, torch.Tensor]] = []
        mega = bench.mega
        launch = mega._launch
        assert mega.launches_per_step == self.config.num_hidden_layers

        def launch_and_keep() -> None:
            launch()
            self.snapshots.append({name: mega.region(name).clone() for name in mega._regions})

        mega._launch = launch_and_keep  # type: ignore[method-assign]
        self.outcome: Outcome = bench.step()
        del mega._launch
        self.epoch = mega._epoch
        self.pools = [(latent.clone(), None if index is None else index.clone()) for latent, index in self._pools()]

    def _pools(self):
        return zip(self.bench.cache.latent, self.bench.cache.index, strict=True)

    def layers(self) -> list[LayerView]:
        return [LayerView(self, layer) for layer in range(self.config.num_hidden_layers)]

    def same_choices(self, selections: list, routes: list) -> torch.Tensor:
        """Which rows chose the same, bool [rows]. Of the other path: what its `select` and `route` gave."""
        same = torch.ones(self.rows, dtype=torch.bool)
        chosen, routed = iter(selections), iter(routes)
        for view, layer in zip(self.layers(), self.stages(exact=False), strict=True):
            if view.full_index:
                positions, _ = next(chosen)
            same &= ~view.long | (view.selection == positions[:, 0]).all(1)
            if not layer.dense:
                experts, _ = next(routed)
                same &= (view.ranked_experts(layer)[0].sort(dim=1).values == experts).all(1)
        assert not [*chosen, *routed]
        return same

    def stages(self, *, exact: bool) -> list[LayerStages]:
        """The layers' formulas; exact: in float32 without any rounding of activations."""
        layers = self.bench.standard.layers
        if not exact:
            return layers
        products = Products(Formats("f32", "f32"), torch.device("cpu"))
        return [
            LayerStages(self.config, number, layer.fields, products, resident=True)
            for number, layer in enumerate(layers)
        ]


class LayerView:
    """The hand-offs of one layer, by what they hold; every tag is checked as they are read.

    Rows are the step's; `long` says whose context is longer than the selection.
    """

    def __init__(self, recording: Recording, number: int) -> None:
        self.recording, self.number, self.config = recording, number, recording.config
        self.bench, self.rows = recording.bench, recording.rows
        self.full_index = self.config.full_index[number]
        self.positions = torch.tensor(self.bench.positions)
        self.long = self.positions + 1 > self.config.index_topk
        self.scored = self.full_index and bool(self.long.any())
        self.angles = rope_angles(self.positions, self.config.rope_theta, self.config.qk_rope_head_dim)
        self.latent_pool, self.index_pool = recording.pools[number]

    def _pairs(self, name: str, slot: int, tag: int, width: int, snapshot: int | None = None) -> torch.Tensor:
        """The first `width` values of each row of a region's slot, float32 [rows, width]."""
        raw = self.recording.snapshots[self.number if snapshot is None else snapshot][name]
        words = raw.view(torch.int32).view(2, ROWS, -1, 2)[slot % 2, : self.rows, :width]
        wrong = (words[..., 1] != self.recording.epoch + tag).nonzero()
        assert not len(wrong), f"{name} of layer {self.number}: {len(wrong)} stale words, the first at {wrong[0]}"
        return words[..., 0].contiguous().view(torch.float32)

    def _words(self, name: str, slot: int, tag: int, width: int, snapshot: int | None = None) -> torch.Tensor:
        """The first `width` activations of each row: a word is an f32 or two bf16, as the model's activations are."""
        if not self.recording.bench.standard.products.rounded:
            return self._pairs(name, slot, tag, width, snapshot)
        return self._pairs(name, slot, tag, width // 2, snapshot).view(torch.bfloat16).to(torch.float32)

    def _attention(self, name: str, width: int) -> torch.Tensor:
        return self._pairs(name, self.number, 2 * self.number + 1, width)

    def _mlp(self, name: str, width: int) -> torch.Tensor:
        return self._pairs(name, self.number, 2 * self.number + 2, width)

    def _attention_words(self, name: str, width: int) -> torch.Tensor:
        return self._words(name, self.number, 2 * self.number + 1, width)

    def _normed(self, values: torch.Tensor, squares: torch.Tensor, eps: float) -> Normed:
        return Normed(values, (squares.sum(-1, keepdim=True) / values.shape[-1] + eps).rsqrt())

    def x_normed(self, half: int) -> Normed:
        """What the norm before attention (0) or the MLP (1) makes of the residual stream, or the next layer's (2)."""
        version, hidden = 2 * self.number + half, self.config.hidden_size
        snapshot = self.number if half else self.number - 1
        values = self._words("x_normed", version, version, hidden, snapshot)
        squares = self._pairs("x_squares", version, version, hidden // TILE_ROWS, snapshot)
        return self._normed(values, squares, self.config.rms_norm_eps)

    def _bulk(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.recording.snapshots[self.number][name].view(dtype).view(ROWS, -1)[: self.rows]

    @cached_property
    def x_in(self) -> torch.Tensor:
        """The residual stream that enters, [rows, hidden]."""
        if self.number == 0:
            return self.bench.standard.embed(self.bench.tokens)
        return self._pairs("x", 2 * self.number, 2 * self.number, self.config.hidden_size, self.number - 1)

    @cached_property
    def x_mid(self) -> torch.Tensor:
        return self._pairs("x", 2 * self.number + 1, 2 * self.number + 1, self.config.hidden_size)

    @cached_property
    def x_out(self) -> torch.Tensor:
        return self._pairs("x", 2 * self.number + 2, 2 * self.number + 2, self.config.hidden_size)

    @cached_property
    def q_normed(self) -> Normed:
        rank = self.config.q_lora_rank
        squares = self._attention("q_squares", rank // TILE_ROWS)
        return self._normed(self._attention_words("q_normed", rank), squares, self.config.latent_norm_eps)

    @cached_property
    def kv_a(self) -> torch.Tensor:
        return self._attention("down_kv", self.config.latent_dim)

    @cached_property
    def index_k(self) -> torch.Tensor:
        return self._attention("down_index", self.config.index_head_dim)

    @cached_property
    def index_weights(self) -> torch.Tensor:
        """Scaled, [rows, index_heads]."""
        c = self.config
        return self._attention("down_index", c.index_head_dim + c.index_n_heads)[:, c.index_head_dim :]

    @cached_property
    def query(self) -> torch.Tensor:
        """[rows, heads, nope + rope]."""
        c = self.config
        return self._attention_words("query", c.num_attention_heads * c.qk_head_dim).unflatten(1, (-1, c.qk_head_dim))

    @cached_property
    def index_query(self) -> torch.Tensor:
        c = self.config
        return self._attention_words("index_query", c.index_n_heads * c.index_head_dim).unflatten(
            1, (-1, c.index_head_dim)
        )

    @cached_property
    def latent_query(self) -> torch.Tensor:
        return self._by_head("latent_query", self.config.kv_lora_rank)

    @cached_property
    def latent_out(self) -> torch.Tensor:
        return self._by_head("latent_out", self.config.kv_lora_rank)

    @cached_property
    def attention_out(self) -> torch.Tensor:
        return self._by_head("attention_out", self.config.v_head_dim)

    def _by_head(self, name: str, width: int) -> torch.Tensor:
        return self._attention_words(name, self.config.num_attention_heads * width).unflatten(1, (-1, width))

    @cached_property
    def router_logits(self) -> torch.Tensor:
        """The kernel keeps products in slices of k, before the norm's division."""
        experts, slices = self.config.n_routed_experts, router_slices(self.config.hidden_size)
        products = self._mlp("router_scores", slices * experts).unflatten(1, (slices, experts)).sum(1)
        return products * self.x_normed(1).scale

    def middle(self, places: int, width: int) -> torch.Tensor:
        """[rows, places, width]: a place is a routed expert of the row's, best first, then the shared one."""
        words = self._words("middle", self.number, 2 * self.number + 2, places * width)
        return words.unflatten(1, (places, width))

    @cached_property
    def index_scores(self) -> torch.Tensor:
        """[rows, positions], of long rows."""
        return self._bulk("index_scores", torch.float32)

    @cached_property
    def selection(self) -> torch.Tensor:
        """[rows, index_topk], of long rows; of the last layer with an indexer."""
        return self._bulk("selection", torch.int32).long()

    def partials(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, splits, heads, kv_lora] and [rows, splits, heads, 2]: maximum, sum."""
        c = self.config
        out, stat = self._bulk("partial_out", torch.float32), self._bulk("partial_stat", torch.float32)
        return (
            out.reshape(self.rows, -1, c.num_attention_heads, c.kv_lora_rank),
            stat.reshape(self.rows, -1, c.num_attention_heads, 2),
        )

    def attended(self, row: int) -> torch.Tensor:
        """The positions that a row attends to."""
        return self.selection[row] if self.long[row] else torch.arange(int(self.positions[row]) + 1)

    def cached(self, pool: torch.Tensor, row: int, positions: torch.Tensor) -> torch.Tensor:
        """A row's cache entries, float32 [positions, width]."""
        return self.bench.cached(pool, row, positions).to(torch.float32)

    def ranked_experts(self, stages: LayerStages) -> tuple[torch.Tensor, torch.Tensor]:
        """By the formula, from the kernel's own logits: experts [rows, topk], best first, and their weights."""
        experts, weights = stages.route(self.router_logits)
        biased = self.router_logits.sigmoid() + stages.vector("router_bias")
        ranked = biased.sort(dim=-1, descending=True, stable=True).indices[:, : experts.shape[1]]
        place = (experts[:, None, :] == ranked[:, :, None]).int().argmax(-1)
        assert torch.equal(ranked, experts.gather(1, place))
        return ranked, weights.gather(1, place)
