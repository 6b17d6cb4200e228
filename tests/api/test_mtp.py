"""Guesses of the model's own layer: never seen in the answer, and all right where layer and model agree."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rocmega import LLM, SamplingParams
from rocmega.errors import CheckpointError, RequestError
from rocmega.packing import open_pack, pack_checkpoint
from rocmega.packing.plan import DRAFT
from rocmega.packing.traffic import read_bytes

NAME = "glm-5.2-mtp-tiny"
SETTINGS = {"device": "host", "max_rows": 8, "max_model_len": 128}
MTP = {"draft_method": "mtp", "draft_tokens": 3}


@pytest.fixture(scope="module")
def random_model(tiny_checkpoint):
    """Whose layer guesses at random."""
    return tiny_checkpoint(NAME)


@pytest.fixture(scope="module")
def agreeing(random_model, tmp_path_factory):
    """Its layers add nothing, so that model and draft layer both say what the last token's embedding says."""
    directory = tmp_path_factory.mktemp("agreeing")
    tensors = {name: t for file in random_model.glob("*.safetensors") for name, t in load_file(file).items()}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    hidden = tensors["model.norm.weight"].shape[0]
    tensors["model.layers.8.eh_proj.weight"] = torch.eye(hidden, 2 * hidden)
    tensors["model.layers.8.enorm.weight"] = torch.ones(hidden)
    tensors["model.layers.8.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((random_model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def answers(checkpoint, prompts, samplings, **settings):
    with LLM(checkpoint, **{**SETTINGS, **settings}) as llm:
        outputs = llm.generate(prompts, samplings)
        return [output.outputs for output in outputs], llm.metrics(), outputs


def test_guesses_of_a_layer_that_agrees_are_all_right(agreeing):
    """Greedy and drawn. 21 tokens: five steps of four, and one."""
    prompts = [[3, 1, 4], [2, 9]]
    samplings = [SamplingParams(max_tokens=21), SamplingParams(max_tokens=21, temperature=1.5, seed=4)]
    plain, _, _ = answers(agreeing, prompts, samplings, path="standard")
    assert len(set(plain[1][0].token_ids)) > 10  # a draw that anybody would guess shows nothing
    guessed, metrics, outputs = answers(agreeing, prompts, samplings, path="standard", **MTP)
    assert guessed == plain
    assert metrics["steps"]["standard"] == 6
    assert metrics["accepted_tokens"] == metrics["drafted_tokens"] == 30
    assert metrics["accepted_length"] == 4
    assert [output.accepted_length for output in outputs] == [4, 4]


def test_wrong_guesses_change_nothing(random_model):
    """Greedy and drawn, with penalties and log probabilities, by the mega-task: all bits."""
    few = dict.fromkeys([7, 9], 60.0)  # so that some of the guesses are right
    samplings = [
        SamplingParams(max_tokens=9, logit_bias=few),
        SamplingParams(max_tokens=9, temperature=1.0, seed=4, logit_bias=few, logprobs=1),
        SamplingParams(max_tokens=6, temperature=0.8, top_p=0.8, seed=5, presence_penalty=0.5),
    ]
    prompts = [[3, 1, 4], list(range(70)), [5]]
    plain, _, _ = answers(random_model, prompts, samplings, path="mega")
    guessed, metrics, outputs = answers(random_model, prompts, samplings, path="mega", **MTP)
    assert guessed == plain
    assert 0 < metrics["accepted_tokens"] < metrics["drafted_tokens"]
    assert metrics["mega_coverage"] == 1
    lengths = [output.accepted_length for output in outputs]
    assert 1 < metrics["accepted_length"] < 4
    assert min(lengths) <= metrics["accepted_length"] <= max(lengths)


def test_drawn_guesses_are_accepted_by_the_rejection_rule(random_model):
    """Layer and model disagree, over three tokens: each of 48 seeds draws what it draws without guesses, so the
    distribution is the model's; and guesses are right more often than chance, less often than always.
    """
    few = dict.fromkeys([7, 9, 11], 100.0)
    samplings = [SamplingParams(max_tokens=3, temperature=6.0, seed=seed, logit_bias=few) for seed in range(48)]
    with LLM(random_model, path="standard", **SETTINGS) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate([[3, 1, 4]] * 48, samplings)]
    with LLM(random_model, path="standard", **{**SETTINGS, "max_rows": 16}, draft_method="mtp", draft_tokens=1) as llm:
        pieces = [
            llm.generate([[3, 1, 4]] * 8, samplings[at : at + 8]) for at in range(0, 48, 8)
        ]  # a row to spare each
        metrics = llm.metrics()
    assert [output.outputs[0].token_ids for piece in pieces for output in piece] == plain
    assert len(set(map(tuple, plain))) > 9
    assert metrics["drafted_tokens"] >= 48
    assert 0.34 < metrics["accepted_tokens"] / metrics["drafted_tokens"] < 0.95


def test_preempted_and_shared_requests(agreeing):
    """Pages for one and a half: whoever is thrown out is decoded again, in pages that others have left behind."""
    prompts = [list(range(120)), [*range(64), *range(200, 254)]]
    sampling = SamplingParams(max_tokens=20)
    settings = {"path": "standard", "prefill_chunk": 64, "max_rows": 4, "max_model_len": 192}
    plain, _, _ = answers(agreeing, prompts, sampling, **settings)
    guessed, metrics, _ = answers(agreeing, prompts, sampling, **settings, cache_pages=4, **MTP)
    assert guessed == plain
    assert metrics["preemptions"] > 0
    assert metrics["reused_tokens"] > 0
    assert metrics["accepted_tokens"] == metrics["drafted_tokens"] >= 20
    assert metrics["pages"]["held"] == 0


def test_what_cannot_be_had_is_refused(tiny, random_model, tiny_checkpoint):
    with pytest.raises(CheckpointError, match="no layer for guessing ahead"):
        LLM(tiny, path="standard", **SETTINGS, **MTP)
    with pytest.raises(RequestError, match="draft_method='magic'"):
        LLM(random_model, path="standard", **SETTINGS, draft_method="magic", draft_tokens=1)
    with pytest.raises(RequestError, match="state of its last tokens"):
        LLM(tiny_checkpoint("deepseek-v4-flash-tiny"), path="standard", **SETTINGS, **MTP)


def test_a_pack_guesses_what_its_checkpoint_does(random_model, tmp_path):
    pack_checkpoint(random_model, tmp_path, arch="host")
    few = SamplingParams(max_tokens=9, logit_bias=dict.fromkeys([7, 9], 60.0))
    (wanted, of_checkpoint, _), (got, of_pack, _) = (
        answers(directory, [[3, 1, 4], [5]], few, path="standard", **MTP) for directory in (random_model, tmp_path)
    )
    assert got == wanted
    assert 0 < of_checkpoint["accepted_tokens"] == of_pack["accepted_tokens"]


def test_a_pack_without_the_layer_says_so(tiny, random_model, tmp_path):
    """Of a checkpoint that has none, and for ranks, on which it does not run."""
    [plain] = pack_checkpoint(tiny, tmp_path / "plain", arch="host")
    with pytest.raises(CheckpointError, match="no layer for guessing ahead"):
        LLM(plain, path="standard", **SETTINGS, **MTP)
    for pack in pack_checkpoint(random_model, tmp_path / "shared", arch="host", tp=2):
        assert not [field for field in open_pack(pack).fields if field.startswith(DRAFT)]


def test_a_pack_with_the_layer_is_no_larger_a_model(random_model, tmp_path):
    """What is loaded for steps, and what they read, is without it; for any architecture."""
    for arch in ("gfx942", "gfx950"):
        [folder] = pack_checkpoint(random_model, tmp_path / arch, arch=arch)
        pack = open_pack(folder)
        held = [name for name in pack.fields if name.startswith(DRAFT)]
        assert {"draft.eh_proj", "draft.gate_up", "draft.head_norm"} <= set(held)
        assert not set(pack.load()) & set(held)
        assert sum(read_bytes(pack.fields[name], 4) for name in held) == 0
        pack.verify()


def test_the_fused_path_leaves_nothing_for_the_layer(random_model, monkeypatch):
    monkeypatch.setattr("rocmega.policy.FUSED_TARGETS", frozenset({"host"}))
    with LLM(random_model, path="standard", **SETTINGS) as llm:
        sequence = llm.runner.sequence()
        with pytest.raises(RequestError, match="does not do: residual"):
            llm.runner.decide([sequence], "fused", frozenset({"greedy", "residual"}))
