"""Packs hold what packing into memory gives, whatever the way they were made, and are loaded only for what they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from rocmega import LLM, SamplingParams
from rocmega.checkpoint import Checkpoint
from rocmega.errors import ConfigError, PackError, RequestError
from rocmega.packing import find, open_pack, pack_checkpoint, plan
from rocmega.packing.loader import rank_folders
from rocmega.packing.manifest import MANIFEST
from tests.packing.kit import KINDS, digests, in_memory, same_bytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["host", "gfx942"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_pack_holds_what_packing_into_memory_gives(kind, arch, tp, tiny_checkpoint, tmp_path):
    checkpoint = tiny_checkpoint("glm-5.2-tiny", kind)
    folders = pack_checkpoint(checkpoint, tmp_path, arch=arch, tp=tp)
    assert [folder.name for folder in folders] == [f"rank-{rank}-of-{tp}" for rank in range(tp)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name for folder in folders]
    for rank, folder in enumerate(folders):
        pack = open_pack(folder)
        assert (pack.arch, pack.tp, pack.rank, pack.family) == (arch, tp, rank, "glm_moe_dsa")
        assert same_bytes(pack.load(), in_memory(checkpoint, tp=tp, rank=rank, arch=arch))
        pack.verify()


@pytest.fixture(scope="session")
def packed(tiny_checkpoint, tmp_path_factory) -> Path:
    """The FP8 tiny model, packed for two ranks of the host. Read only."""
    out = tmp_path_factory.mktemp("packed")
    pack_checkpoint(tiny_checkpoint("glm-5.2-tiny", "fp8"), out, arch="host", tp=2)
    return out


@pytest.fixture
def copy(packed, tmp_path) -> Path:
    """Rank 0 of it, to damage."""
    return Path(shutil.copytree(packed / "rank-0-of-2", tmp_path / "copy"))


@pytest.mark.parametrize("threads", [1, 5])
def test_the_same_bytes_whatever_the_way(threads, packed, tiny_checkpoint, tmp_path):
    """Another time, with other threads, one rank alone: also the manifest is the same."""
    checkpoint = tiny_checkpoint("glm-5.2-tiny", "fp8")
    pack_checkpoint(checkpoint, tmp_path, arch="host", tp=2, ranks=[1], threads=threads)
    assert digests(tmp_path) == {name: digest for name, digest in digests(packed).items() if name.startswith("rank-1")}


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_large_tensors_are_packed_in_bands_of_rows(kind, tiny_checkpoint, tmp_path, monkeypatch):
    checkpoint = tiny_checkpoint("glm-5.2-tiny", kind)
    whole = pack_checkpoint(checkpoint, tmp_path / "whole", arch="gfx942", tp=2)
    monkeypatch.setattr(plan, "BAND_BYTES", 8192)
    banded = pack_checkpoint(checkpoint, tmp_path / "banded", arch="gfx942", tp=2)
    for one, other in zip(whole, banded, strict=True):
        assert same_bytes(open_pack(one).load(), open_pack(other).load())
        open_pack(other).verify()
        parts = json.loads((other / "checksums.json").read_text())
        assert len(parts["embedding"]) == 4  # 512 rows in bands of 128
        assert len(parts["head.tiles"]) == 2  # the rank's 256


def test_files_are_safetensors(packed):
    """Which other tools read, and whose tiles begin at multiples of their size."""
    for folder in rank_folders(packed).values():
        pack = open_pack(folder)
        for file, tensors in pack.headers.items():
            with safe_open(folder / file, framework="pt") as opened:
                assert set(opened.keys()) == set(tensors)
            for name, info in tensors.items():
                assert info.offset % (1024 if name.endswith(".tiles") else 4) == 0
        loaded = pack.load()
        with safe_open(folder / "layer-00003.safetensors", framework="pt") as opened:
            assert torch.equal(opened.get_tensor("layers.3.gate_up.tiles"), loaded["layers.3.gate_up"].tiles)


def test_the_manifest_says_what_decides_the_bytes(packed, tiny_checkpoint):
    manifest = json.loads((packed / "rank-1-of-2" / MANIFEST).read_text())
    assert manifest["layout"] == {"tag": "rocmega-tiles", "version": 1}
    assert (manifest["arch"], manifest["tp"], manifest["rank"]) == ("host", 2, 1)
    assert manifest["formats"] == {"linear": "fp8_32", "island": "bf16", "expert": "fp8_32", "dense": "fp8_32"}
    checkpoint = tiny_checkpoint("glm-5.2-tiny", "fp8")
    assert manifest["config"] == json.loads((checkpoint / "config.json").read_text())
    assert set(manifest["source"]["files"]) == {path.name for path in checkpoint.glob("*.safetensors")}
    assert str(checkpoint.parent) not in json.dumps(manifest)


def test_a_finished_pack_is_not_made_again(packed, tiny_checkpoint, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in packed.rglob("*")}
    monkeypatch.setattr("rocmega.packing.writer._Run._all_jobs", lambda run: pytest.fail("packed again"))
    pack_checkpoint(tiny_checkpoint("glm-5.2-tiny", "fp8"), packed, arch="host", tp=2)
    assert {path: path.stat().st_mtime_ns for path in packed.rglob("*")} == before


@pytest.mark.parametrize("kind", ["f32", "mxfp4"])
def test_a_pack_generates_what_its_checkpoint_does(kind, tiny_checkpoint, tmp_path):
    checkpoint = tiny_checkpoint("glm-5.2-tiny", kind)
    [folder] = pack_checkpoint(checkpoint, tmp_path / "pack", arch="gfx942")
    outputs = []
    for model in (checkpoint, tmp_path / "pack", folder):
        with LLM(model, path="standard", max_rows=1, max_model_len=64) as llm:
            [result] = llm.generate([3, 1, 4, 1, 5], SamplingParams(max_tokens=8))
            outputs.append(result.outputs[0].token_ids)
    assert outputs[0] == outputs[1] == outputs[2]


def test_the_mega_task_takes_a_pack(tiny_checkpoint, tmp_path):
    """Bit for bit what it makes of the checkpoint; close to the standard path."""
    checkpoint = tiny_checkpoint("glm-5.2-tiny", "mxfp4")
    pack_checkpoint(checkpoint, tmp_path, arch="host")
    logits: dict[tuple[Path, str], list[torch.Tensor]] = {}
    for model, path in ((checkpoint, "mega"), (tmp_path, "mega"), (tmp_path, "standard")):
        rows = logits.setdefault((model, path), [])
        with LLM(model, path=path, max_rows=1, max_model_len=64, blocks=2) as llm:
            params = SamplingParams(max_tokens=3)
            llm.generate([3, 1, 4], params, observer=lambda request, number, row, rows=rows: rows.append(row.clone()))
    ours, packed, standard = (torch.stack(rows) for rows in logits.values())
    assert torch.equal(ours, packed)
    assert (packed - standard).norm() < 2e-2 * standard.norm()


# What is refused.


def test_packs_for_something_else(packed, tiny_checkpoint):
    pack = open_pack(packed / "rank-0-of-2")
    pack.check_for(arch="host", tp=2, rank=0, checkpoint=Checkpoint(tiny_checkpoint("glm-5.2-tiny", "fp8")))
    with pytest.raises(PackError, match=r"rank-0-of-2 was packed for host and this is gfx950.*--arch gfx950"):
        pack.check_for(arch="gfx950", tp=2)
    with pytest.raises(PackError, match=r"is rank 0 of 2 and rank 0 of 1 is wanted"):
        pack.check_for()
    with pytest.raises(PackError, match=r"is rank 0 of 2 and rank 1 of 2 is wanted"):
        pack.check_for(tp=2, rank=1)
    with pytest.raises(PackError, match=r"from another checkpoint \(\w{16}\) than .*bf16 \(\w{16}\): their config"):
        pack.check_for(tp=2, checkpoint=Checkpoint(tiny_checkpoint("glm-5.2-tiny", "bf16")))


def test_another_fine_tuning_of_the_same_model_is_another_source(tmp_path):
    """Same names, shapes and sizes; the samples tell."""
    from rocmega.models.glm.presets import write_checkpoint

    one, other = (write_checkpoint("glm-5.2-tiny", tmp_path / f"{seed}", "fp8", seed) for seed in (0, 1))
    [folder] = pack_checkpoint(one, tmp_path / "pack", arch="host")
    open_pack(folder).check_for(checkpoint=Checkpoint(one))
    with pytest.raises(PackError, match=r"their model-00001-of-00003.safetensors differ in samples: \w{12} and \w{12}"):
        open_pack(folder).check_for(checkpoint=Checkpoint(other))


def test_find(packed, tmp_path):
    assert find(packed, tp=2, rank=1) == packed / "rank-1-of-2"
    assert find(packed / "rank-1-of-2") == packed / "rank-1-of-2"
    assert find(tmp_path) is None
    assert find(tmp_path / "nowhere") is None
    with pytest.raises(PackError, match=r"holds packs of rank 0 of 2, rank 1 of 2; rank 0 of 1 is wanted"):
        find(packed)
    with pytest.raises(PackError, match=r"rank 0 of 1 is wanted"):
        LLM(packed, path="standard")


def change_manifest(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, **changes}))


def test_another_layout_version(copy):
    change_manifest(copy, layout={"tag": "rocmega-tiles", "version": 2}, rocmega="9.0")
    with pytest.raises(PackError, match=r"has layout rocmega-tiles 2 \(rocmega 9.0\) .* reads rocmega-tiles 1"):
        open_pack(copy)


@pytest.mark.parametrize("changes", [{"fields": 3}, {"files": {}}, {"tp": "x"}, {"source": None}, {"formats": 1}])
def test_a_damaged_manifest(changes, copy):
    change_manifest(copy, **changes)
    with pytest.raises(PackError, match=r"manifest.json is damaged|pack"):
        open_pack(copy)


def test_a_manifest_that_leads_out_of_the_folder(copy):
    files = json.loads((copy / MANIFEST).read_text())["files"]
    change_manifest(copy, files={"../x.safetensors": files["top.safetensors"], **files})
    with pytest.raises(PackError, match=r"manifest.json is damaged"):
        open_pack(copy)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_no_manifest_to_read(text, copy):
    (copy / MANIFEST).write_text(text)
    with pytest.raises(PackError, match=r"manifest.json is damaged"):
        open_pack(copy)


def test_files_that_are_not_what_was_written(copy):
    path = copy / "layer-00003.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(PackError, match=r"layer-00003.safetensors is \d+ bytes long and was written with \d+"):
        open_pack(copy)
    path.write_bytes(content.replace(b"layers.3.q_a.tiles", b"layers.3.q_x.tiles"))
    with pytest.raises(PackError, match=r"layer-00003.safetensors is damaged: its header is not what was written"):
        open_pack(copy)
    path.write_bytes(b"\xff" * len(content))
    with pytest.raises(PackError, match=r"layer-00003.safetensors says that its header is .* bytes long"):
        open_pack(copy)
    path.unlink()
    with pytest.raises(PackError, match=r"layer-00003.safetensors cannot be read"):
        open_pack(copy)


def test_a_flipped_byte_in_a_pack(copy):
    """Not noticed on loading, which reads nothing; `verify` reads all."""
    path = copy / "layer-00005.safetensors"
    content = bytearray(path.read_bytes())
    info = open_pack(copy).headers[path.name]["layers.5.down.tiles"]
    content[info.offset + 12345] ^= 4
    path.write_bytes(content)
    with pytest.raises(PackError, match=r"layer-00005.safetensors is damaged: bytes \d+ to \d+ of tensor layers.5.do"):
        open_pack(copy).verify()


def test_damaged_checksums(copy):
    path = copy / "checksums.json"
    path.write_text(path.read_text().replace("1", "2", 1))
    with pytest.raises(PackError, match=r"checksums.json is damaged"):
        open_pack(copy).verify()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"arch": "gfx90a"}, RequestError, "gfx90a"),
        ({"arch": "host", "tp": 2, "ranks": [2]}, RequestError, "rank 2 of 2: ranks are numbered from 0 to 1"),
        ({"arch": "host", "tp": 3}, ConfigError, "3 ranks cannot share this model evenly: num_attention_heads 4"),
        ({"arch": "host", "tp": 4}, ConfigError, r"parts of q_b_proj rows 320 begin and end inside blocks"),
    ],
)
def test_what_cannot_be_packed(options, error, message, tiny_checkpoint, tmp_path):
    with pytest.raises(error, match=message):
        pack_checkpoint(tiny_checkpoint("glm-5.2-tiny", "fp8"), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_another_pack_in_the_same_place(packed, tiny_checkpoint):
    with pytest.raises(PackError, match=r"rank-0-of-2 is another pack .* architecture gfx942 is asked for and host is"):
        pack_checkpoint(tiny_checkpoint("glm-5.2-tiny", "fp8"), packed, arch="gfx942", tp=2)
    with pytest.raises(PackError, match=r"formats bf16 bf16 bf16 bf16 is asked for and fp8_32"):
        pack_checkpoint(tiny_checkpoint("glm-5.2-tiny", "bf16"), packed, arch="host", tp=2)
