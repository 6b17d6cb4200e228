"""DeepSeek's mega-task on a real GPU: the CPU target's tokens, the same bits for any blocks, layers of real size."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rocmega.checkpoint import Checkpoint
from rocmega.drivers.select import kind_for, pick
from rocmega.models.common.random_weights import random_fields
from rocmega.models.deepseek import config as deepseek_config
from rocmega.models.deepseek import mega, presets, shard, standard, weights
from rocmega.models.deepseek.plan import plan
from rocmega.step import StepBatch

pytestmark = pytest.mark.skipif(kind_for() == "host", reason="needs a GPU")

FAMILIES = ("deepseek-v4-flash-tiny", "deepseek-v4.1-flash-tiny")
CONTEXT, PROMPT = 192, 75
F32_BOUND = 1e-3  # as for GLM (test_glm.py): three TF32 products for one of f32


class Model:
    """A tiny model on one device, with room for 8 requests."""

    def __init__(self, checkpoint: Path, device: str, activations: str = "auto"):
        self.driver = pick(device)
        self.config = deepseek_config.from_dir(checkpoint)
        self.packed = weights.pack(
            Checkpoint(checkpoint),
            self.config,
            device=self.driver.device,
            arch=self.driver.arch,
            activations=activations,
        )
        self.cache = self.config.cache_spec(self.packed.formats.cache).open(8 * CONTEXT // 64, 8, self.driver)
        self.standard = standard.StandardPath(self.config, self.packed, self.cache, activations=activations)
        self.activations = activations

    def mega(self, **options: Any) -> mega.MegaPath:
        options = {"max_model_len": CONTEXT, "activations": self.activations, **options}
        return mega.MegaPath(self.config, self.packed, self.cache, self.driver, **options)

    def prefill(self, request: int, prompt: torch.Tensor) -> int:
        self.cache.grow(request, CONTEXT)
        [table] = self.cache.block_table([request], CONTEXT // 64)
        return int(self.standard.prefill(prompt.to(self.driver.device), 0, table).argmax())

    def batch(self, requests: list[int], tokens: list[int], positions: list[int]) -> StepBatch:
        table = self.cache.block_table(requests, CONTEXT // 64)
        return StepBatch(torch.tensor(tokens).int(), torch.tensor(positions).int(), table)


def prompt_of(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(seed)).int()


@pytest.mark.parametrize("dtype", ["f32", "mxfp4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_of_the_cpu_target(name: str, dtype: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """With f32 activations."""
    checkpoint = tiny_checkpoint(name, dtype)
    here, host = (Model(checkpoint, device, "f32") for device in ("auto", "host"))
    paths = here.mega(), host.mega(blocks=4)
    token = here.prefill(0, prompt_of(PROMPT, 1))
    assert token == host.prefill(0, prompt_of(PROMPT, 1))
    for step in range(64):
        results = [
            path.decode(m.batch([0], [token], [PROMPT + step])) for path, m in zip(paths, (here, host), strict=True)
        ]
        assert int(results[0].tokens[0]) == int(results[1].tokens[0]), f"step {step}"
        assert float((results[0].logits.cpu() - results[1].logits).abs().max()) < F32_BOUND
        token = int(results[0].tokens[0])


@pytest.mark.parametrize("dtype", ["f32", "bf16", "mxfp4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_do_not_depend_on_blocks_or_splits(name: str, dtype: str, tiny_checkpoint: Callable[..., Path]) -> None:
    model = Model(tiny_checkpoint(name, dtype), "auto")
    lengths = {0: 1, 1: 23, 2: 63, 3: 75, 4: 127}
    for request, length in lengths.items():
        model.prefill(request, prompt_of(length, request))
    batch = model.batch(list(lengths), [7, 8, 9, 10, 11], list(lengths.values()))
    before = [pool.clone() for pool in model.cache.pools.values()]
    first = None
    for options in (*({"blocks": blocks} for blocks in (1, 2, 7, 33, None)), {"mega_tasks": 3}):
        path = model.mega(**options)
        for _ in range(20):
            for pool, was in zip(model.cache.pools.values(), before, strict=True):
                pool.copy_(was)
            result = path.decode(batch)
            first = result.logits.clone() if first is None else first
            assert torch.equal(result.logits, first), options
        path.close()


LAYERS = {
    "deepseek-v4-flash": 4,
    "deepseek-v4.1-flash": 4,
}  # window alone, both kinds of entries, both kinds of routing


def real(name: str, driver: Any) -> tuple[Any, Any]:
    """The first layers at their published size, with random weights and, where there is Engram, a small table of it."""
    fields = presets.preset(name)
    if "text_config" in fields:
        small = {"engram_layer_ids": [1], "engram_vocab_size": 20000}
        fields = presets.v41_config({**fields["text_config"], **small})
    config = shard.first_layers(deepseek_config.from_dict(fields), LAYERS[name])
    linear = "fp8" if config.scale_block == 128 else "fp8_32"
    stored = weights.Formats(linear, "bf16", "mxfp4", "mxfp8" if config.engram else "")
    made = plan(config, stored, arch=driver.arch)
    values = random_fields(made, LAYERS[name], driver.device, plain=shard.plain_fields(config))
    return config, weights.assemble(made.formats, config, values)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_real_size(name: str, rows: int) -> None:
    """Against the standard path, which rounds in other places: each is some 1e-2 from exact logits, by choices of
    nearly equal experts now and then more, so the middle one of several tokens is asked for. Prints the time of a step.
    """
    driver = pick("auto")
    config, packed = real(name, driver)
    context = 4096
    sides = []
    for _ in range(2):
        cache = config.cache_spec("bf16").open(rows * context // 64, rows, driver)
        noise = torch.Generator(driver.device).manual_seed(3)
        for pool in cache.pools.values():
            pool.normal_(generator=noise) if pool.is_floating_point() else pool.zero_()
        for row in range(rows):
            cache.grow(row, context)
        sides.append(cache)
    path = mega.MegaPath(config, packed, sides[0], driver, max_model_len=context)
    other = standard.StandardPath(config, packed, sides[1])
    apart = []
    for step in range(6):
        tokens = torch.randint(0, config.vocab_size, (rows,), generator=torch.Generator().manual_seed(step)).int()
        positions = torch.full((rows,), 3001 + step, dtype=torch.int32)
        batch = [StepBatch(tokens, positions, cache.block_table(range(rows))) for cache in sides]
        mine, theirs = path.decode(batch[0]).logits, other.decode(batch[1])
        assert mine is not None
        apart += ((mine - theirs).norm(dim=1) / theirs.norm(dim=1)).tolist()
    print(f"{name}, {rows} rows: {statistics.median(apart):.1e} apart, at most {max(apart):.1e}")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    path.place(batch[0], logits=False)
    path.enqueue()
    begin.record()
    for _ in range(100):
        path.enqueue()
    end.record()
    torch.cuda.synchronize()
    path.result()
    print(f"{LAYERS[name]} layers, embedding and head: {begin.elapsed_time(end) / 100:.3f} ms a step")
    assert statistics.median(apart) < 5e-2
