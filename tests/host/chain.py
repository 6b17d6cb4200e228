"""The chain kernel: weights, memory, launches, and what numpy says it should compute."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch

from rocmega.drivers import Driver, Function
from rocmega.toolchain import Unit, compile

SOURCE = Path(__file__).with_name("chain.hip")
STAGES = ("embed", "squeeze", "widen", "narrow")
ROWS, H, R, I, VOCAB = 16, 128, 64, 256, 64
LARGE_LDS = 4 * ROWS * (I + 8) // 2

MUTANTS = {
    1: "no drain before the flag",
    2: "flag stored before the data",
    3: "tagged pair stored plain",
    4: "plain load, no acquire, by the consumer",
    5: "block barrier missing before LDS is used again",
    6: "a producer that never publishes",
    7: "epochs reused (two tags in turn)",
    8: "no release after plain stores",
    9: "no acquire before plain loads",
    10: "one buffer slot instead of two",
    11: "only the publishing wave drains",
    12: "no barrier between drain and flag",
    13: "shared word read past the accessors",
}

_WORDS = ("rows", "layers", "steps", "limit", "mutant", "first_version")
_WEIGHTS = ("embedding", "squeeze", "widen", "narrow")
_REGIONS = ("x", "small", "wide", "x_flags", "wide_flags", "error", "tokens", "out")


class Params(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_uint32) for name in _WORDS],
        *[(name, ctypes.c_uint64) for name in _WEIGHTS + _REGIONS],
    ]


def wide(b: torch.Tensor) -> np.ndarray:
    return b.float().numpy()


class Chain:
    """One set of weights. Every run has new memory, unless `keep` is given."""

    def __init__(self, layers: int = 2, steps: int = 2) -> None:
        self.layers, self.steps = layers, steps
        random = torch.Generator().manual_seed(1)

        def matrix(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=random) / shape[-1] ** 0.5).bfloat16()

        self.weights = [
            torch.randn(VOCAB, H, generator=random).bfloat16(),
            matrix(layers, R, H),
            matrix(layers, I, R),
            matrix(layers, H, I),
        ]
        self.words = {
            "x": 2 * ROWS * H,
            "small": 2 * ROWS * R * 2,
            "wide": 2 * ROWS * I // 2,
            "x_flags": H // 16 * 2,
            "wide_flags": I // 16 * 2,
            "error": 6,
            "tokens": steps * ROWS,
            "out": steps * ROWS * H,
        }
        self.functions: dict[str, Function] = {}
        self.error: list[int] = []

    def function(self, driver: Driver) -> Function:
        if driver.arch not in self.functions:
            artifact = compile(Unit("chain", SOURCE, {}, {}), driver.arch)
            self.functions[driver.arch] = driver.load(artifact).function("chain", STAGES)
        return self.functions[driver.arch]

    def run(
        self,
        driver: Driver,
        *,
        rows: int,
        blocks: int,
        mutant: int = 0,
        limit: int = 10**6,
        launches: int = 1,
        short: dict[str, int] | None = None,
        reuse: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Outputs as bits [steps, rows, H] and tokens [steps, rows]. short: words to take off a region."""
        buffers = {n: driver.shared(n, 4 * (w - (short or {}).get(n, 0))) for n, w in self.words.items()}
        try:
            for i in range(launches):
                first = 0 if reuse else i * self.steps * (self.layers + 1)
                params = Params(rows, self.layers, self.steps, limit, mutant, first)
                weights = [weight.to(driver.device) for weight in self.weights]
                for name, weight in zip(_WEIGHTS, weights, strict=True):
                    setattr(params, name, driver.constant(weight))
                for name, buffer in buffers.items():
                    setattr(params, name, buffer.address)
                there = torch.frombuffer(bytearray(params), dtype=torch.uint8).to(driver.device)
                lds = LARGE_LDS if driver.name == "cuda" else 0
                driver.launch(self.function(driver), driver.constant(there), blocks, 256, lds)
                driver.synchronize()
            words = {n: buffers[n].tensor.cpu().clone().view(torch.int32) for n in ("error", "out", "tokens")}
            self.error = words["error"].tolist()
            out = words["out"].view(self.steps, ROWS, H)[:, :rows].numpy()
            return out, words["tokens"].view(self.steps, ROWS)[:, :rows].numpy()
        finally:
            for buffer in buffers.values():
                buffer.close()

    def reference(self, tokens: np.ndarray) -> np.ndarray:
        """float32 numpy, roundings to bf16 where the kernel has them, given the tokens that it chose."""
        embedding, squeeze, widen, narrow = map(wide, self.weights)

        def rounded(a: np.ndarray) -> np.ndarray:
            return wide(torch.from_numpy(a).bfloat16())

        outs = []
        for step in range(self.steps):
            x = embedding[tokens[step]]
            for layer in range(self.layers):
                normed = rounded(x / np.sqrt((x * x).mean(1, keepdims=True) + np.float32(1e-6)))
                small = rounded(normed @ squeeze[layer].T)
                h = small @ widen[layer].T
                x = x + rounded(h / (1 + np.exp(-h))) @ narrow[layer].T
            outs.append(x)
        return np.array(outs)
