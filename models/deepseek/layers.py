"""What each layer of DeepSeek is, as config.json says it: compression, sharing, routing by hash, Engram."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rocmega.cache import PAGE
from rocmega.models.deepseek.config import V4, V41, V41_TEXT, Candidates, Compressed, DeepseekConfig, Engram, Reader
from rocmega.models.deepseek.engram import primes

# transformers' names of a layer's attention, and what DeepSeek's own config.json calls it.
_WINDOW, _CSA, _HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_KINDS = {0: _WINDOW, 4: _CSA, 128: _HCA}


def check_ratios(ratios: Sequence[int]) -> str:
    """Why entries of these ratios have no place in pages, empty if they have.

    An entry lies in the page of its last token: whole entries a page, or whole pages an entry.
    """
    bad = sorted({ratio for ratio in ratios if ratio and PAGE % ratio and ratio % PAGE})
    return f"ratios {bad} neither divide a page of {PAGE} tokens nor are multiples of it" if bad else ""


class V4Reader(Reader):
    """A flat config.json, DeepSeek's or transformers'."""

    fixed: ClassVar = {**Reader.fixed, "model_type": V4}
    own = Reader.own | {
        "layer_types", "compress_rates", "compress_rate_csa", "compress_rate_hca", "mlp_layer_types", "num_hash_layers",
    }  # fmt: skip

    def read(self) -> DeepseekConfig:
        fields = self._common()
        layers = fields["num_hidden_layers"]
        rates = self._rates()
        kinds = self._layer_kinds(layers)
        fields["compressed"] = tuple(
            Compressed(rates[kind], layer, layer if kind == _CSA else None, overlap=kind == _CSA)
            if kind != _WINDOW
            else None
            for layer, kind in enumerate(kinds)
        )
        fields["hash_layers"] = self._hash_layers(layers)
        fault = check_ratios([rates[kind] for kind in kinds if kind != _WINDOW])
        if fault:
            self._refuse(fault)
        self._raise_reasons()
        return DeepseekConfig(model_type=V4, **fields)

    def _rates(self) -> dict[str, int]:
        """Tokens of an entry, by kind of layer."""
        rates = {_CSA: 4, _HCA: 128}
        given = self.config.get("compress_rates", {})
        if not isinstance(given, dict) or given.keys() - rates.keys():
            self._refuse(f"compress_rates is {given!r}, not an object of {_CSA} and {_HCA}")
            given = {}
        for name, kind in (("compress_rate_csa", _CSA), ("compress_rate_hca", _HCA)):
            value = self.config.get(name)
            if value is not None and given.get(kind, value) != value:
                self._refuse(f"{name} {value!r} and compress_rates differ")
            elif value is not None:
                given = {**given, kind: value}
        for kind, value in given.items():
            if type(value) is int and value > 1:
                rates[kind] = value
            else:
                self._refuse(f"compress_rates.{kind} is {value!r}, not a number of tokens above 1")
        return rates

    def _layer_kinds(self, layers: int) -> tuple[str, ...]:
        found: dict[str, tuple[str, ...]] = {}
        if "layer_types" in self.config:
            found["layer_types"] = self._kinds("layer_types", layers, {kind: kind for kind in _KINDS.values()})
        if "compress_ratios" in self.config:
            ratios = self._ratios(layers, _KINDS)
            found["compress_ratios"] = tuple(_KINDS[ratio] for ratio in ratios)
        if not {"layer_types", "compress_ratios"} & self.config.keys():
            self._refuse("layer_types and compress_ratios are both missing")
        return self._agreed(found, (_WINDOW,) * layers)

    def _hash_layers(self, layers: int) -> tuple[bool, ...]:
        found: dict[str, tuple[bool, ...]] = {}
        if "mlp_layer_types" in self.config:
            found["mlp_layer_types"] = self._kinds("mlp_layer_types", layers, {"hash_moe": True, "moe": False})
        if "num_hash_layers" in self.config:
            count = self.config["num_hash_layers"]
            if type(count) is not int or count < 0:
                self._refuse(f"num_hash_layers is {count!r}, not a natural number")
            else:
                found["num_hash_layers"] = tuple(layer < count for layer in range(layers))
        if not {"mlp_layer_types", "num_hash_layers"} & self.config.keys():
            self._refuse("mlp_layer_types and num_hash_layers are both missing")
        return self._agreed(found, (False,) * layers)


class V41Reader(Reader):
    """A config.json with the language model in text_config; vision is not run, and text alone needs nothing of it."""

    block = 32
    fixed: ClassVar = {**Reader.fixed, "model_type": V41_TEXT}
    own = Reader.own | {
        "kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id", "candidate_topk_blocks",
        "candidate_block_size", "engram_layer_ids", "engram_num_embeddings", "engram_max_ngram_size", "engram_n_heads",
        "engram_head_dim", "engram_vocab_size", "engram_pad_token_id", "engram_compressed_vocab_size",
    }  # fmt: skip
    outer: ClassVar = {
        "architectures", "auto_map", "_name_or_path", "model_type", "dtype", "torch_dtype", "transformers_version",
        "bos_token_id", "pad_token_id", "image_token_id", "vision_config", "text_config", "use_cache",
        "tie_word_embeddings", "initializer_range",
    }  # fmt: skip

    def __init__(self, config: dict[str, Any]):
        text = config.get("text_config")
        if text is None and config.get("model_type") == V41_TEXT:
            super().__init__(config)
            return
        super().__init__(text if isinstance(text, dict) else {})
        if not isinstance(text, dict):
            self._refuse(f"text_config is {text!r}, not an object" if text is not None else "text_config is missing")
        for name, value in config.items():
            if name in ("quantization_config", "expert_dtype", "eos_token_id") and value is not None:
                if self.config.setdefault(name, value) != value:
                    self._refuse(f"{name} and text_config.{name} differ")
            elif name not in self.outer and value is not None:
                self._refuse(f"{name} is not a field known for this model and could change its mathematics")
        if config.get("tie_word_embeddings"):
            self._refuse("tie_word_embeddings is True and only False is supported")

    def read(self) -> DeepseekConfig:
        fields = self._common()
        layers = fields["num_hidden_layers"]
        ratios = self._ratios(layers)
        sources = self._ids("kv_source_layer_ids", layers)
        selectors = self._ids("index_source_layer_ids", layers)
        fields["compressed"] = self._compressed(ratios, sources, selectors)
        fields["hash_layers"] = (False,) * layers
        fields["candidates"] = self._candidates(selectors, fields["compressed"])
        fields["engram"] = self._engram(layers, fields["vocab_size"])
        fault = check_ratios(ratios)
        if fault:
            self._refuse(fault)
        self._raise_reasons()
        return DeepseekConfig(model_type=V41, **fields)

    def _ids(self, name: str, layers: int) -> tuple[int, ...]:
        ids = self.config.get(name, [])
        if not isinstance(ids, list) or not all(type(layer) is int and 0 <= layer < layers for layer in ids):
            self._refuse(f"{name} is {ids!r}, not a list of layers below {layers}")
            return ()
        if sorted(set(ids)) != ids:
            self._refuse(f"{name} {ids} is not in ascending order")
        return tuple(ids)

    def _compressed(
        self, ratios: tuple[int, ...], sources: tuple[int, ...], selectors: tuple[int, ...]
    ) -> tuple[Compressed | None, ...]:
        """Each layer reads the entries that the last source before it made, and the last selection from them."""
        out: list[Compressed | None] = []
        source = selector = None
        for layer, ratio in enumerate(ratios):
            if not ratio:
                for name, ids in (("kv_source_layer_ids", sources), ("index_source_layer_ids", selectors)):
                    if layer in ids:
                        self._refuse(f"{name} has layer {layer}, whose compress_ratios entry is 0")
                out.append(None)
                continue
            if layer in sources:
                source, selector = layer, None
            if layer in selectors:
                selector = layer
            if source is None or selector is None:
                what = "entries" if source is None else f"selection from the entries of layer {source}"
                self._refuse(f"layer {layer} has ratio {ratio} and there is no {what} for it to read")
                return (None,) * len(ratios)
            if ratios[source] != ratio:
                self._refuse(f"layer {layer} has ratio {ratio} and reads entries of ratio {ratios[source]}")
            out.append(Compressed(ratio, source, selector, gated=ratio > 1))
        return tuple(out)

    def _candidates(self, selectors: tuple[int, ...], compressed: tuple[Compressed | None, ...]) -> Candidates | None:
        source = self.config.get("candidate_source_layer_id", -1)
        if source == -1:
            return None
        if source not in selectors:
            self._refuse(f"candidate_source_layer_id {source!r} is not one of index_source_layer_ids")
            return None
        entries = {kind.source for layer in selectors if layer >= source and (kind := compressed[layer])}
        if len(entries) > 1:
            self._refuse(f"candidates of layer {source} would bind selections from other entries than its own")
        return Candidates(source, self._size("candidate_topk_blocks"), self._size("candidate_block_size"))

    def _engram(self, layers: int, vocab: int) -> Engram | None:
        ids = self._ids("engram_layer_ids", layers)
        if not ids:
            return None
        names = ("max_ngram_size", "n_heads", "head_dim", "vocab_size", "compressed_vocab_size")
        sizes = {name: self._size(f"engram_{name}") for name in names}
        pad = self.config.get("engram_pad_token_id")
        if type(pad) is not int or not 0 <= pad < vocab:
            self._refuse(f"engram_pad_token_id is {pad!r}, not a token")
            pad = 0
        if sizes["max_ngram_size"] < 2:
            self._refuse(f"engram_max_ngram_size {sizes['max_ngram_size']} has no n-grams: they begin at 2")
            return None
        if sizes["n_heads"] * sizes["max_ngram_size"] > 1024 or sizes["vocab_size"] > 1 << 26:
            self._refuse("engram_n_heads, engram_max_ngram_size or engram_vocab_size is not sensible")
            return None
        rows = tuple(sum(of) for of in primes(len(ids), **_prime_sizes(sizes)))
        given = self.config.get("engram_num_embeddings")
        if given is not None and tuple(given if isinstance(given, list) else ()) != rows:
            self._refuse(f"engram_num_embeddings is {given!r}, and the other fields make it {list(rows)}")
        return Engram(layers=ids, rows=rows, pad_token_id=pad, **sizes)


def _prime_sizes(sizes: dict[str, int]) -> dict[str, int]:
    return {name: sizes[name] for name in ("max_ngram_size", "n_heads", "vocab_size")}
