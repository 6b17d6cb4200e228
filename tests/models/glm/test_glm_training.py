"""The trainable model is the model: its logits are the standard path's; a few steps of training do what they say."""

from __future__ import annotations

import json

import pytest
import torch

from rocmega.cache import PagedCache, TorchMemory
from rocmega.checkpoint import Checkpoint
from rocmega.models.glm.config import from_dict
from rocmega.models.glm.presets import preset, write_weights
from rocmega.models.glm.standard import StandardPath
from rocmega.models.glm.training.__main__ import main
from rocmega.models.glm.training.data import IGNORED, Sequences, encode
from rocmega.models.glm.training.model import Trainable
from rocmega.models.glm.training.train import Recipe, train
from rocmega.models.glm.weights import pack

SMALL = preset("glm-5.2-puzzles") | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "index_topk": 24,
}
LENGTH = 96  # four times the selection


@pytest.fixture
def model() -> Trainable:
    made = Trainable(from_dict(SMALL), seed=1, device="cpu")
    for bias in made.biases.values():
        bias.normal_(0, 0.2, generator=torch.Generator().manual_seed(2))
    return made


def standard(model: Trainable, folder) -> StandardPath:
    write_weights(SMALL, folder, "f32", lambda name, _: model.tensor(name))
    config = from_dict(SMALL)
    weights = pack(Checkpoint(folder), config)
    return StandardPath(config, weights, PagedCache(config.cache_spec("f32"), 4, TorchMemory("cpu")))


def test_the_forward_is_the_standard_paths(model, tmp_path):
    path = standard(model, tmp_path / "model")
    tokens = torch.randint(128, (LENGTH,), generator=torch.Generator().manual_seed(3))
    table = torch.tensor([0, 1], dtype=torch.int32)
    with torch.no_grad():
        mine = model.forward(tokens[None], sparse=True).logits[0]
        everything = model.forward(tokens[None], sparse=False).logits[0]
        theirs = path.head(path.forward(tokens[None], path.span(torch.arange(LENGTH)[None], table[None])))[0]
    assert (mine - theirs).abs().max() < 1e-4 * theirs.abs().max()
    assert (everything[:24] - theirs[:24]).abs().max() < 1e-4 * theirs.abs().max()  # nothing to leave out yet
    assert (everything[24:] - theirs[24:]).abs().max() > 1e-2 * theirs.abs().max()


def test_indexers_learn_from_attention_alone_and_attention_not_from_them(model):
    indexers = {name for name in model.weights if ".indexer." in name}
    outcome = model.forward(torch.randint(128, (2, 48)), sparse=True)
    outcome.index_loss.backward(retain_graph=True)
    assert {name for name, weight in model.weights.items() if weight.grad is not None} == indexers
    outcome.logits.sum().backward()
    assert {name for name, weight in model.weights.items() if weight.grad is None} == set()


def test_every_expert_counts_its_tokens(model):
    outcome = model.forward(torch.randint(128, (2, 48)), sparse=False)
    assert set(outcome.loads) == {1, 2, 3}
    assert all(load.sum() == 2 * 48 * SMALL["num_experts_per_tok"] for load in outcome.loads.values())


def test_only_answers_and_their_ends_are_to_be_predicted():
    tokens, targets = Sequences(batches=2, rows=3, length=200, seed=5)[1]
    text = bytes(tokens[0].tolist()).decode()
    wanted = bytes(token for token in targets[0].tolist() if token != IGNORED).decode()
    puzzles = [part.split("=") for part in text.split("\x03") if "=" in part]
    assert len(puzzles) > 2
    assert wanted == "".join(f"{answer}\x03" for _, answer in puzzles)
    for at in (targets[0] != IGNORED).nonzero()[:-1, 0].tolist():
        assert targets[0, at] == tokens[0, at + 1]
    again, other = (Sequences(2, 3, 200, 5)[batch][0] for batch in (1, 0))
    assert (again == tokens).all()
    assert (other != tokens).any()


def test_one_command_trains_examines_and_writes_what_can_be_loaded(tmp_path, monkeypatch, capsys):
    from rocmega import LLM
    from rocmega.models.glm.training import __main__ as command

    monkeypatch.setattr(command, "preset", lambda name: SMALL)
    monkeypatch.setattr(command, "EXAMINED", 2)
    monkeypatch.setattr(command, "GLANCED", 1)
    main([str(tmp_path), "--device", "cpu", "--steps", "4", "--rows", "2", "--length", "40", "--workers", "0"])
    assert "4 steps" in capsys.readouterr().out
    about = json.loads((tmp_path / "training.json").read_text())
    assert about["steps"] == 4
    assert set(about["right"]) == {
        "add",
        "subtract",
        "multiply",
        "copy",
        "reverse",
        "sort",
        "count",
        "largest",
        "recall",
    }
    for dtype in ("bf16", "fp8"):
        with LLM(tmp_path / dtype, path="standard", max_rows=1, max_model_len=64) as llm:
            assert llm.runner.weights.formats.linear == dtype
            assert llm.tokenizer.encode("add 1+2=") == encode("add 1+2=")
            assert llm.tokenizer.decode([*encode("a b\n7"), 3]) == "a b\n7"
            [output] = llm.generate("copy ab=")
            assert len(output.outputs[0].token_ids) > 0


def test_a_model_learns_a_sequence_by_heart(model):
    """One batch again and again: the loss falls to almost nothing, so gradients go where they should."""
    recipe = Recipe(steps=40, rows=2, length=40, seconds=1e9, workers=0, rate=1e-2, dense=0.5)
    losses = []
    with pytest.MonkeyPatch.context() as patch:
        batch = Sequences(1, 2, 40, 0)[0]
        patch.setattr(Sequences, "__getitem__", lambda self, at: batch)
        for now in train(model, recipe):
            losses.append(float(now.loss))
    assert len(losses) == 40
    assert losses[0] > 3
    assert losses[-1] < 0.1
