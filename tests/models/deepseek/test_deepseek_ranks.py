"""Ranks that share a model of DeepSeek: both paths against one rank's, the mega-task to the bit among the ranks."""

from __future__ import annotations

import pytest
import torch

from rocmega.check import Case
from rocmega.checkpoint import Checkpoint
from rocmega.models.deepseek.check import MegaSubject
from rocmega.models.deepseek.config import from_dir
from rocmega.models.deepseek.standard import StandardPath
from rocmega.models.deepseek.weights import pack
from rocmega.parallel.threads import ThreadRanks
from tests.models.deepseek.conftest import FAMILIES

ROWS, VOCAB = 3, 512
NEAR = 1e-4  # a sum of products is cut into one more piece than on one rank, in each layer


@pytest.mark.parametrize("name", FAMILIES)
def test_the_mega_task_of_two_ranks(name):
    """Logits, tokens and caches; under the checker's eyes, in an order that it makes up."""
    one, two = MegaSubject(name, "f32"), MegaSubject(name, "f32", 2)
    two.driver.check, two.driver.seed = True, 3
    alone, both = one.run(Case(0, 2, ROWS, 8)), two.run(Case(0, 3, ROWS, 2))
    report = two.driver.last_report
    assert report is not None
    assert not report.reports, report.text
    assert both[: len(both) // 2] == both[len(both) // 2 :]
    logits = [torch.frombuffer(bytearray(each), dtype=torch.float32, count=ROWS * VOCAB) for each in (alone, both)]
    assert (logits[0] - logits[1]).abs().max() < NEAR


@pytest.mark.parametrize("name", FAMILIES)
def test_the_standard_path_of_two_ranks(name, tiny_checkpoint, everywhere, prompt):
    directory = tiny_checkpoint(name)
    config, ranks = from_dir(directory), ThreadRanks(2)
    parts = [pack(Checkpoint(directory), config, tp=2, rank=rank) for rank in range(2)]

    def run(rank: int) -> torch.Tensor:
        cache = config.cache_spec(parts[rank].formats.cache).open(2, 1, ranks.drivers[rank])
        cache.grow("a", len(prompt))
        path = StandardPath(config, parts[rank], cache, group=ranks.members[rank])
        logits = path.prefill(prompt, 0, cache.block_table(["a"])[0])
        cache.close()
        return logits

    for logits in ranks.run(run):
        assert (logits - everywhere(name)[-1]).abs().max() < NEAR
