"""The layer for guessing ahead: against transformers' layer, prompt against single positions, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rocmega.cache import TorchMemory
from rocmega.checkpoint import Checkpoint
from rocmega.errors import CheckpointError
from rocmega.models.glm import draft
from rocmega.models.glm.config import from_dir
from rocmega.step import StepBatch

NAME = "glm-5.2-mtp-tiny"
POSITIONS = 60  # more than twice index_topk


@pytest.fixture
def layer(model, tiny_checkpoint):
    """layer("fp8"): a model, and its layer for guessing ahead with an empty cache."""

    def make(dtype="f32"):
        main = model(NAME, dtype)
        weights = draft.load(Checkpoint(tiny_checkpoint(NAME, dtype)), main.config)
        return main, draft.DraftPath(main.path, weights, TorchMemory())

    return make


def prefilled(main, path):
    """A prompt of one token more than POSITIONS; the layer's output of the last, and what the model left everywhere."""
    tokens = torch.randint(0, 512, (POSITIONS + 1,), generator=torch.Generator().manual_seed(3))
    main.cache.grow("a", POSITIONS + 8)
    table, seen = main.cache.block_table(["a"]), []
    main.path.prefill(tokens[:-1], 0, table[0], chunk=25, observe=seen.append)
    residual = torch.cat(seen)
    return tokens, table, residual, path.prefill_draft(tokens[1:], residual, 0, table[0])


def test_equals_transformers_layer(layer, tiny_checkpoint):
    """As a model of one layer that is given its input: x = eh_proj [rms(embed), rms(model's output)]."""
    transformers = pytest.importorskip("transformers", minversion="5.7.0")
    main, path = layer()
    tokens, _, residual, output = prefilled(main, path)
    directory = tiny_checkpoint(NAME)
    stored = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    prefix = f"model.layers.{main.config.num_hidden_layers}."
    own = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    config = transformers.AutoConfig.from_pretrained(directory)
    config.num_hidden_layers, config.indexer_types, config.mlp_layer_types = 1, ["full"], ["sparse"]
    config._attn_implementation, config.dtype = "eager", torch.float32
    hf = transformers.GlmMoeDsaForCausalLM(config).eval()
    mine = {f"model.layers.0.{name}": tensor for name, tensor in own.items()}
    _load(hf, mine | {"model.norm.weight": own["shared_head.norm.weight"], "lm_head.weight": stored["lm_head.weight"]})

    def rms(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + main.config.rms_norm_eps).sqrt() * weight

    embedded = rms(stored["model.embed_tokens.weight"][tokens[1:]], own["enorm.weight"])
    hidden = rms(rms(residual, stored["model.norm.weight"]), own["hnorm.weight"])
    x = torch.cat([embedded, hidden], -1) @ own["eh_proj.weight"].mT
    with torch.no_grad():
        wanted = hf(inputs_embeds=x[None], use_cache=False).logits[0, -1]
    got = path.logits(output[None])[0]
    assert (got - wanted).norm() < 1e-5 * wanted.norm()


def _load(hf, tensors):
    """A layer's published tensors into transformers' module, whose experts are fused."""
    state = {}
    experts = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." in name}
    count = 1 + max(int(name.split(".")[5]) for name in experts)
    at = "model.layers.0.mlp.experts."
    parts = {part: [experts[f"{at}{e}.{part}_proj.weight"] for e in range(count)] for part in ("gate", "up", "down")}
    state[f"{at}gate_up_proj"] = torch.cat([torch.stack(parts["gate"]), torch.stack(parts["up"])], 1)
    state[f"{at}down_proj"] = torch.stack(parts["down"])
    state |= {name: tensor for name, tensor in tensors.items() if name not in experts}
    missing, _ = hf.load_state_dict(state, strict=False)
    assert [name for name in missing if name != "model.embed_tokens.weight"] == []


@pytest.mark.parametrize(("dtype", "bound"), [("f32", 1e-5), ("fp8", 2e-2), ("mxfp4", 2e-2)])
def test_position_by_position_equals_a_prompt(layer, dtype, bound):
    """Sums in another order, and, where activations are rounded, now and then a neighbour of bf16: 2^-9 each."""
    main, path = layer(dtype)
    tokens, table, residual, at_once = prefilled(main, path)
    entries = [pool.clone() for pool in (path.cache.latent[0], path.cache.index[0])]
    for pool in (path.cache.latent[0], path.cache.index[0]):
        pool.zero_()
    for begin in range(0, POSITIONS, 4):  # four rows of one request see one another
        positions = list(range(begin, min(begin + 4, POSITIONS)))
        hidden = path.model_output(residual[positions])
        rows = table.expand(len(positions), -1)
        output = path.advance(tokens[1:][positions].tolist(), hidden, positions, rows)
    assert (output[-1] - at_once).norm() < bound * at_once.norm()
    for pool, wanted in zip((path.cache.latent[0], path.cache.index[0]), entries, strict=True):
        assert (pool.float() - wanted.float()).norm() < bound * wanted.float().norm()


def test_what_the_paths_leave(server):
    """The residual stream after the layers, by the standard path and by the mega-task."""
    both = server(NAME, blocks=2)
    both.begin("a", torch.arange(9))
    both.begin("b", torch.arange(30, 70))
    both.step("a", "b")
    position = torch.tensor([both.length[name] - 1 for name in "ab"], dtype=torch.int32)
    tokens = torch.tensor([both.tokens[name][-2] for name in "ab"], dtype=torch.int32)
    mega = both.mega.residual()
    batch = StepBatch(tokens, position, both.cache.block_table("ab"))
    logits, standard = both.standard.decode_with_residual(batch)
    assert torch.equal(both.standard.decode(batch), logits)
    assert mega.shape == standard.shape
    assert (mega - standard).norm() < 1e-5 * standard.norm()


def test_a_checkpoint_without_the_layer(tiny, tiny_checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="no layer for guessing ahead"):
        draft.load(Checkpoint(tiny), from_dir(tiny))
    whole = tiny_checkpoint(NAME)
    tensors = {name: tensor for file in whole.glob("*.safetensors") for name, tensor in load_file(file).items()}
    tensors["model.layers.8.hnorm.weight"] = torch.ones(3)
    del tensors["model.layers.8.enorm.weight"], tensors["model.layers.8.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(json.loads((whole / "config.json").read_text())))
    with pytest.raises(CheckpointError, match=r"experts\.3\.up_proj.*missing.*enorm.*missing.*hnorm.* is \[3\], not"):
        draft.load(Checkpoint(tmp_path), from_dir(tmp_path))
