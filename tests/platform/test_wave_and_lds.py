"""Wave and LDS primitives: what `rocmega selftest` asks of them, and that it would notice."""

from __future__ import annotations

import pytest
import torch

from rocmega.drivers import Driver
from rocmega.drivers.host import HostDriver
from rocmega.selftest import primitives
from tests.platform.kit import module, module_of


def test_wave(driver: Driver) -> None:
    primitives.waves(driver, module_of(driver))


def test_lds(driver: Driver) -> None:
    primitives.lds(driver, module_of(driver))


NOTICED = {
    "waves": r"wave_sum: 1 of 256 values are wrong, the first number 5: expected .*, saw ",
    "lds": r"lds_add: 1 of 64 values are wrong, the first number 5",
    "codes": r"decoding FP8, OCP: 1 of 256 values are wrong, the first number 5: expected 0.00976",
}


@pytest.mark.parametrize("check", NOTICED)
def test_a_wrong_value_is_noticed(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = primitives.run

    def wrong(*args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, out2 = run(*args, **options)  # type: ignore[arg-type]
        out[5] += 1
        return out, out2

    monkeypatch.setattr(primitives, "run", wrong)
    with pytest.raises(primitives.PrimitiveError, match=NOTICED[check]):
        getattr(primitives, check)(HostDriver(), module())


@pytest.mark.parametrize("kind", primitives.PRODUCTS)
def test_a_transposed_product_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = primitives.pack
    monkeypatch.setattr(primitives, "pack", lambda matrix: pack(matrix.flip(0)))
    with pytest.raises(primitives.PrimitiveError, match=rf"matrix units, {kind}: \d+ of 256 .* that of row"):
        primitives.product(HostDriver(), module(), kind)
