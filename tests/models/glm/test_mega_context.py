"""What the mega-task reads of the caches: long contexts, ties between positions, and never what is not a row's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocmega.cache import PAGE, PagedCache
from rocmega.checkpoint.tiles import PackedMatrix
from rocmega.drivers.host import HostDriver
from rocmega.models.glm import formulas, standard
from rocmega.models.glm.kernel import ROWS
from rocmega.models.glm.mega import MegaPath
from rocmega.step import StepBatch
from tests.models.glm.kit import POSITIONS, Bench

LONG = (599, 383, 384, 447, 320, 23)  # page borders among them; 24 are selected


def kernel_selection(subject: Bench) -> torch.Tensor:
    """Of the last layer with an indexer, [ROWS, index_topk]; meaningful for rows longer than that."""
    return subject.mega.region("selection", torch.int32).view(ROWS, -1).long()


def kernel_scores(subject: Bench, row: int) -> torch.Tensor:
    """Of the last layer with an indexer, up to the row's own position."""
    scores = subject.mega.region("index_scores", torch.float32).view(ROWS, -1)
    return scores[row, : subject.positions[row] + 1]


@pytest.mark.parametrize("name", ["glm-5-tiny", "glm-5.2-tiny"])
def test_long_contexts_equal_the_standard_path(name, bench, monkeypatch):
    subject: Bench = bench(name, "f32", LONG)
    ours = subject.step()
    selection = kernel_selection(subject)[: len(LONG) - 1].clone()
    selections = []

    def select(*args):
        selections.append(formulas.select(*args))
        return selections[-1]

    monkeypatch.setattr(standard, "select", select)
    theirs = subject.standard_step()
    assert torch.equal(selection, selections[-1][0][: len(LONG) - 1, 0])
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=0)
    ours, theirs = (each.entries.view(torch.float32) for each in (ours, theirs))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_without_head_weights_all_scores_tie(packed):
    """Every score is 0: the selection is the lowest positions, in every block of threads and every page."""
    config, weights = packed("glm-5.2-tiny", "f32")
    layers = [dict(layer) for layer in weights.layers]
    for layer in layers:
        if "index_weights" in layer:
            matrix = layer["index_weights"]
            assert isinstance(matrix, PackedMatrix)
            layer["index_weights"] = replace(matrix, tiles=torch.zeros_like(matrix.tiles))
    subject = Bench(config, replace(weights, layers=layers), LONG)
    subject.step()
    for row in range(len(LONG) - 1):
        assert not kernel_scores(subject, row).any()
        assert kernel_selection(subject)[row].tolist() == list(range(24))
    subject.close()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_equal_keys_tie_across_pages(dtype, bench):
    """A few keys of their own, all others one key: of these the lowest positions fill the selection up."""
    subject: Bench = bench("glm-5.2-tiny", dtype, (599, 100))
    random = torch.Generator().manual_seed(3)
    own = {row: torch.randperm(position, generator=random)[:20] for row, position in enumerate(subject.positions)}
    for keys in subject.noise[len(subject.cache.latent) :]:
        for row, position in enumerate(subject.positions):
            at = torch.arange(position)
            pages = subject.table[row, at // PAGE].long()
            kept = keys[pages[own[row]], own[row] % PAGE]
            keys[pages, at % PAGE] = 0.1 * keys[0, 0]  # small: some of the own ones are better, some worse
            keys[pages[own[row]], own[row] % PAGE] = kept
    subject.step()
    for row, position in enumerate(subject.positions):
        scores = kernel_scores(subject, row)
        tied = torch.ones(position + 1, dtype=torch.bool)
        tied[own[row]] = tied[position] = False
        assert len(scores[tied].unique()) == 1  # the same key has the same score wherever it is
        selection = kernel_selection(subject)[row]
        expected, _ = formulas.select(scores[None, None], torch.tensor([[position]]), 24)
        assert torch.equal(selection, expected[0, 0])
        taken = selection[tied[selection]]
        assert 4 <= len(taken) < 24  # the tie is at the border
        assert torch.equal(taken, tied.nonzero()[: len(taken), 0])


def poison_cache(subject: Bench) -> None:
    """NaN wherever no row has a cached position: pages that are nobody's, and past the end of everybody's."""
    used = torch.zeros(subject.cache.pages, PAGE, dtype=torch.bool)
    for row, position in enumerate(subject.positions):
        at = torch.arange(position)
        used[subject.table[row, at // PAGE].long(), at % PAGE] = True
    for pool in subject.noise:
        pool[~used] = float("nan")


def poison_regions(subject: Bench, tags: bool) -> None:
    """Every word a NaN; the tags too (then they are before any epoch), or left as they are."""
    for name, buffer in subject.mega._regions.items():
        if name == "error":
            continue
        words = buffer.tensor.view(torch.int32)
        if tags or name in ("index_scores", "selection", "partial_out", "partial_stat", "logits", "tokens_out"):
            words.fill_(-1)
        else:
            words.view(-1, 2)[:, 0] = -1


@pytest.mark.parametrize(("name", "dtype"), [("glm-5.2-tiny", "f32"), ("glm-5.2-tiny", "fp8"), ("odd", "bf16")])
def test_what_nobody_wrote_is_never_used(name, dtype, bench):
    subject: Bench = bench(name, dtype, POSITIONS)
    expected = subject.step([0, 1, 2])
    assert expected.logits.isfinite().all()
    poison_cache(subject)
    for tags in (False, True):
        subject.step()  # 16 rows leave their tags
        poison_regions(subject, tags)
        assert subject.step([0, 1, 2]).same_bits(expected)


def test_caches_past_4_gib(packed):
    """The same context in pages at both ends of sparse pools of more than 4 GiB: bytes are counted in 64 bits."""
    config, weights = packed("glm-5.2-tiny", "f32")
    driver = HostDriver()
    cache = PagedCache(config.cache_spec("f32"), 280_000, driver)
    latents = cache.latent[0]
    assert latents[:, 0].numel() * PAGE * latents.itemsize > 1 << 32
    random = torch.Generator().manual_seed(5)
    path = MegaPath(config, weights, cache, driver, blocks=3, max_model_len=160)
    logits = []
    low = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    for table in (low, cache.pages - 1 - low):
        random.manual_seed(5)
        for pool in (*cache.latent, *cache.index):
            if pool is not None:
                pool[table[0].long()] = torch.randn(3, PAGE, pool.shape[2], generator=random)
        position = torch.tensor([150], dtype=torch.int32)
        logits.append(path.decode(StepBatch(torch.tensor([7], dtype=torch.int32), position, table)).logits.clone())
    assert torch.equal(*logits)
    path.close()
    cache.close()
