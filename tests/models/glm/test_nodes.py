"""A stack that is divided among nodes: the bits of one node's, by both paths, and only its own layers on each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocmega.cache import PagedCache
from rocmega.checkpoint import Checkpoint
from rocmega.drivers.host import HostDriver
from rocmega.errors import ConfigError
from rocmega.models.glm import presets
from rocmega.models.glm.config import from_dict
from rocmega.models.glm.mega import MegaPath
from rocmega.models.glm.standard import StandardPath
from rocmega.models.glm.weights import pack
from tests.models.glm.kit import POSITIONS, Bench


class Wire:
    """Nodes of one process, run one after the other: what one sends waits for the next."""

    def __init__(self, node: int, nodes: int, sent: list[torch.Tensor], last: list[torch.Tensor]) -> None:
        self.node, self.nodes, self.sent, self.last = node, nodes, sent, last

    def receive(self, into: torch.Tensor) -> None:
        into.copy_(self.sent.pop())

    def send(self, tensor: torch.Tensor) -> None:
        self.sent.append(tensor.clone())

    def from_last(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.node + 1 == self.nodes:
            self.last.append(tensor.clone())
        return tensor


class Nodes:
    """The model of a bench on `count` nodes, over the same noise."""

    def __init__(self, whole: Bench, checkpoint: Checkpoint, count: int) -> None:
        self.whole, self.driver = whole, HostDriver()
        self.last: list[torch.Tensor] = []
        sent: list[torch.Tensor] = []
        self.paths, self.standards, self.caches = [], [], []
        for node, section in enumerate(whole.config.sections(count)):
            wire = Wire(node, count, sent, self.last)
            weights = pack(checkpoint, whole.config, section=section)
            spec = replace(whole.config.cache_spec(weights.formats.cache), section=section)
            self.caches.append(PagedCache(spec, whole.cache.pages, self.driver))
            self.standards.append(StandardPath(whole.config, weights, self.caches[-1], pipeline=wire))
            longest = whole.max_model_len
            mega = MegaPath(
                whole.config, weights, self.caches[-1], self.driver, blocks=4, max_model_len=longest, pipeline=wire
            )
            self.paths.append(mega)

    def step(self, mega: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        """What the last node told all others, and the new cache entries, as bytes."""
        self.last.clear()
        for path, standard, cache in zip(self.paths, self.standards, self.caches, strict=True):
            for pools, whole in ((cache.latent, self.whole.cache.latent), (cache.index, self.whole.cache.index)):
                for pool, as_before in zip(pools, whole, strict=True):
                    if pool is not None and pool.numel():
                        pool.copy_(as_before)
            if mega:
                path.decode(self.whole.batch())
            else:
                standard.decode(self.whole.batch())
        pages, places = self.whole.slots()
        pools = [
            next(pool for pool in of if pool.numel())
            for name in ("latent", "index")
            for of in zip(*(getattr(cache, name) for cache in self.caches), strict=True)
            if of[0] is not None
        ]
        return self.last, torch.cat([p[pages, places].contiguous().view(torch.uint8) for p in pools], dim=1)

    def close(self) -> None:
        for made in (*self.paths, *self.caches):
            made.close()


@pytest.mark.parametrize(("name", "dtype", "count"), [("glm-5.2-tiny", "bf16", 2), ("glm-5-tiny", "f32", 3)])
def test_the_bits_of_one_node(name, dtype, count, bench, tiny_checkpoint):
    whole: Bench = bench(name, dtype, POSITIONS[:3], blocks=3)
    nodes = Nodes(whole, Checkpoint(tiny_checkpoint(name, dtype)), count)
    nodes.driver.check = True
    whole.reset()
    (tokens, logits), entries = nodes.step(mega=True)
    expected = whole.step()
    assert torch.equal(tokens, expected.tokens)
    assert torch.equal(logits.view(torch.int32), expected.logits.view(torch.int32))
    assert torch.equal(entries, expected.entries)
    whole.reset()
    [logits], entries = nodes.step(mega=False)
    expected = whole.standard_step()
    assert torch.equal(logits.view(torch.int32), expected.logits.view(torch.int32))
    assert torch.equal(entries, expected.entries)
    assert sum(cache.bytes() for cache in nodes.caches) == whole.cache.bytes()
    assert max(path.weights.bytes() for path in nodes.paths) < whole.weights.bytes()
    nodes.close()


def test_every_node_begins_with_a_layer_that_selects_for_itself():
    config = from_dict(presets.preset("glm-5.2"))
    for nodes in (1, 2, 3, 4, 8):
        sections = config.sections(nodes)
        assert [layer for section in sections for layer in section] == list(range(config.num_hidden_layers))
        assert all(config.full_index[section[0]] for section in sections)
        assert max(map(len, sections)) - min(map(len, sections)) <= 6
    with pytest.raises(ConfigError, match="99 nodes: each begins with a layer that has an indexer of its own"):
        config.sections(99)
