"""The `activations` option of the public API, and that weights are packed for the device that runs them."""

from __future__ import annotations

import pytest

from rocmega import LLM, SamplingParams
from rocmega.drivers.host import HostDriver
from rocmega.errors import DriverError, RequestError
from rocmega.packing import pack_checkpoint

PROMPTS = [[3, 1, 4], list(range(70))]


def generate(checkpoint, **settings):
    """Tokens and the last step's logits of each row, the activations that were chosen, and steps by path."""
    rows = {}
    with LLM(checkpoint, max_rows=2, max_model_len=128, **settings) as llm:
        sampling = SamplingParams(max_tokens=3)
        outputs = llm.generate(
            PROMPTS, sampling, observer=lambda row, number, logits: rows.update({row: logits.clone()})
        )
        tokens = [output.outputs[0].token_ids for output in outputs]
        return tokens, rows, llm.runner.activations, llm.metrics()["steps"]


def test_each_is_what_it_says(tiny_checkpoint):
    """f32 is the exact twin's result; bf16 and fp8 are off by their roundings, 2^-9 and 2^-4 at most."""
    checkpoint, twin = (tiny_checkpoint("glm-5.2-tiny", "fp8", dequantized=exact) for exact in (False, True))
    tokens, exact, chosen, _ = generate(twin, path="standard")
    assert chosen == "f32"
    found = {
        asked: generate(checkpoint, path="standard", activations=asked) for asked in ("auto", "f32", "bf16", "fp8")
    }
    assert [found[asked][2] for asked in found] == ["bf16", "f32", "bf16", "fp8"]
    assert found["auto"][0] == found["bf16"][0]
    assert found["f32"][0] == tokens
    errors = {
        a: max(float((rows[r] - exact[r]).norm() / exact[r].norm()) for r in rows)
        for a, (_, rows, _, _) in found.items()
    }
    assert errors["f32"] < 1e-5 < 1e-3 < errors["bf16"] < errors["fp8"]


def test_the_mega_task_takes_the_same(tiny_checkpoint):
    checkpoint = tiny_checkpoint("glm-5.2-tiny", "fp8")
    tokens, _, _, _ = generate(checkpoint, path="standard", activations="f32")
    mega = generate(checkpoint, path="mega", device="host", activations="f32")
    assert mega[0] == tokens
    assert mega[3] == {"mega": 3, "fused": 0, "standard": 0}


@pytest.mark.parametrize(
    ("dtype", "asked", "message"),
    [("f32", "bf16", "float32"), ("bf16", "fp8", "quantized weights"), ("fp8", "int8", "auto, f32, bf16, fp8")],
)
def test_refused_before_anything_is_packed(dtype, asked, message, tiny_checkpoint, monkeypatch):
    checkpoint = tiny_checkpoint("glm-5.2-tiny", dtype)
    monkeypatch.setattr("rocmega.models.common.weights.make_fields", lambda *_: pytest.fail("packing"))
    with pytest.raises(RequestError, match=message):
        LLM(checkpoint, path="standard", activations=asked)


def test_a_pack_has_no_exact_absorbed_matrices(tiny_checkpoint, tmp_path):
    pack_checkpoint(tiny_checkpoint("glm-5.2-tiny", "fp8"), tmp_path, arch="host", tp=1)
    with pytest.raises(RequestError, match="Load the checkpoint itself"):
        LLM(tmp_path, path="standard", activations="f32")


def test_weights_are_packed_for_the_device(tiny_checkpoint, monkeypatch):
    """A GPU that reads FNUZ gets FNUZ. Its kernel cannot run here; the standard path reads the same bytes."""

    class Mi300x(HostDriver):
        arch = "gfx942"

        def load(self, artifact):
            raise DriverError("no such GPU here")

    checkpoint = tiny_checkpoint("glm-5.2-tiny", "fp8")
    expected = generate(checkpoint, path="standard")
    built = []
    monkeypatch.setattr("rocmega.models.common.mega.compile_unit", lambda unit, target: built.append((unit, target)))
    monkeypatch.setattr("rocmega.drivers.select.pick", lambda *_, **__: Mi300x())
    monkeypatch.setattr("rocmega.fused.steps.find_spec", lambda name: None)  # else Triton's interpreter plays the GPU
    tokens, _, _, steps = generate(checkpoint, path="auto")
    [(unit, target)] = built
    assert (unit.name, target) == ("glm-fp8_fnuz-bf16-abf16-tp1", "gfx942")
    assert tokens == expected[0]
    assert steps == {"mega": 0, "fused": 0, "standard": 3}
