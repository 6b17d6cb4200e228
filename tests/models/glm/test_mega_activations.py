"""FP8 and f32 activations: stages on their own input, against formulas that quantize at the same place, or nowhere."""

from __future__ import annotations

import pytest
import torch

from rocmega.models.glm.formulas import fp8_activations, mxfp8_activations
from tests.models.glm.recording import Recording
from tests.models.glm.test_mega_stages import CHECKS, ROWS_OF, SAME_ROUNDING, errors

# e4m3 has three bits: an error of 2^-4 of a value at most, 2.5 % of a value in the mean square, which sums of products
# with random signs keep; gate times up has it twice, and numbers far below their group's largest have a little more.
QUANTIZED = 8e-2


@pytest.fixture(scope="module", params=["fp8", "mxfp4"])
def recording(request, bench) -> Recording:
    subject = bench("glm-5.2-tiny", request.param, ROWS_OF["glm-5.2-tiny"], activations="fp8")
    subject.remake(blocks=3, mega_tasks=subject.config.num_hidden_layers)
    return Recording(subject)


@pytest.mark.parametrize("name", ["down", "query", "output", "gate_up", "down_sum"])
def test_stage_is_its_formula(name, recording):
    same, none = (errors(recording, CHECKS[name], exact=exact) for exact in (False, True))
    print(f"{name}: {max(same):.1e} with the same rounding, {max(none):.1e} with none")
    assert max(same) <= SAME_ROUNDING
    assert 1e-3 < max(none) <= QUANTIZED


@pytest.fixture(scope="module")
def exact(bench) -> Recording:
    subject = bench("glm-5.2-tiny", "mxfp4", ROWS_OF["glm-5.2-tiny"], activations="f32")
    subject.remake(blocks=3, mega_tasks=subject.config.num_hidden_layers)
    return Recording(subject)


@pytest.mark.parametrize("name", CHECKS)
def test_stage_with_f32_activations_rounds_nothing(name, exact):
    found = errors(exact, CHECKS[name], exact=True)
    assert found
    assert max(found) <= SAME_ROUNDING


def test_checks_are_clean_and_bits_the_same(recording):
    subject = recording.bench
    expected = subject.step()
    subject.driver.check = True
    for blocks, seed in ((2, 1), (5, 4)):
        subject.remake(blocks)
        subject.driver.seed = seed
        assert subject.step().same_bits(expected)
    subject.driver.check = False


def test_formulas():
    x = torch.zeros(2, 160)
    x[0, :3] = torch.tensor([448.0, 1.0, -3.3])  # scale 1: to the nearest e4m3
    x[1, 128:131] = torch.tensor([0.3, -0.1, 0.007])
    assert fp8_activations(x)[0, :3].tolist() == [448.0, 1.0, -3.25]
    assert fp8_activations(x)[1, 128].item() == pytest.approx(0.3, rel=1e-6)  # a group's largest is kept
    assert mxfp8_activations(x)[0, :3].tolist() == [448.0, 1.0, -3.25]
    # 0.3 / 448 is 0.00067, so the scale is 2^-10: 307.2, -102.4 and 7.168 become 320, -104 and 7.
    assert mxfp8_activations(x)[1, 128:131].tolist() == [320 / 1024, -104 / 1024, 7 / 1024]
