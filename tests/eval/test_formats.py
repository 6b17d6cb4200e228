import pytest

from rocmega.checkpoint import Checkpoint
from rocmega.checkpoint.layouts import read_matrix
from rocmega.checkpoint.quantize import quantize_fp8, quantize_mxfp4
from rocmega.checkpoint.tiles import dequantize_fp8, dequantize_mxfp4
from rocmega.errors import ConfigError, RequestError
from rocmega.eval.formats import convert

EXPERT, ATTENTION = "model.layers.4.mlp.experts.3.up_proj.weight", "model.layers.4.self_attn.o_proj.weight"


def values(directory, name):
    return read_matrix(Checkpoint(directory), name).dequantize()


def test_formats_are_the_nearest_values_in_them(tiny, tmp_path):
    fp8, mxfp4 = convert(tiny, tmp_path / "fp8", "fp8"), convert(tiny, tmp_path / "mxfp4", "mxfp4")
    for name in (EXPERT, ATTENTION):
        assert (values(fp8, name) == dequantize_fp8(*quantize_fp8(values(tiny, name)))).all()
    assert (values(mxfp4, EXPERT) == dequantize_mxfp4(*quantize_mxfp4(values(tiny, EXPERT)))).all()
    assert (values(mxfp4, ATTENTION) == values(fp8, ATTENTION)).all()


def test_float32_of_fp8_has_its_values_and_fp8_of_fp8_is_itself(tiny_checkpoint, tmp_path):
    fp8 = Checkpoint(tiny_checkpoint("glm-5.2-tiny", "fp8"))
    exact, again = (Checkpoint(convert(fp8.directory, tmp_path / format, format)) for format in ("f32", "fp8"))
    assert again.names() == fp8.names()
    assert exact.names() == [name for name in fp8.names() if "scale" not in name]
    for name in (EXPERT, ATTENTION, "model.embed_tokens.weight"):
        for made in (exact, again):
            assert (read_matrix(made, name).dequantize() == read_matrix(fp8, name).dequantize()).all()


def test_other_formats_and_families_are_refused(tiny, tiny_checkpoint, tmp_path):
    with pytest.raises(RequestError, match="int4"):
        convert(tiny, tmp_path / "int4", "int4")
    with pytest.raises(RequestError, match="only of GLM"):
        convert(tiny_checkpoint("deepseek-v4-flash-tiny"), tmp_path / "f32", "f32")
    with pytest.raises(ConfigError, match=r"config\.json"):
        convert(tmp_path / "nothing", tmp_path / "f32", "f32")
