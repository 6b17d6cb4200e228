"""`python -m rocmega.models.glm.training FOLDER`: trains, examines, and writes the checkpoints."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, fields
from pathlib import Path

import torch

from rocmega.models.glm.config import from_dict
from rocmega.models.glm.presets import preset, write_weights
from rocmega.models.glm.training.data import write_tokenizer
from rocmega.models.glm.training.model import Trainable
from rocmega.models.glm.training.train import Recipe, grade, train

MODEL = "glm-5.2-puzzles"
EXAMINED = 400  # puzzles of each task, at the end
GLANCED = 50  # on the way
TOLD = 250  # steps


def main(arguments: list[str] | None = None) -> None:
    """Trains by the recipe of the arguments, prints as it goes, and writes bf16/, fp8/ and training.json."""
    folder, recipe, device = _parse(arguments)
    folder.mkdir(parents=True, exist_ok=True)
    model = Trainable(from_dict(preset(MODEL)), recipe.seed, device)
    start = time.monotonic()
    for now in train(model, recipe):
        if now.step % TOLD == 0:
            print(
                f"step {now.step}, {now.done:4.0%}, {time.monotonic() - start:4.0f} s: loss {float(now.loss):.4f}, "
                f"index loss {float(now.index_loss):.4f}; right: {_shares(grade(model, GLANCED))}",
                flush=True,
            )
    seconds, shares = time.monotonic() - start, grade(model, EXAMINED)
    print(f"{now.step + 1} steps in {seconds:.0f} s; right, of {EXAMINED} unseen puzzles each: {_shares(shares)}")
    for dtype in ("bf16", "fp8"):
        # The FP8 weights are the bf16 ones quantized: `rocmega eval --formats` then makes the same from bf16/.
        write_weights(preset(MODEL), folder / dtype, dtype, lambda name, _: model.tensor(name).bfloat16().float())
        write_tokenizer(folder / dtype)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    about = {"recipe": asdict(recipe), "steps": now.step + 1, "seconds": round(seconds, 1), "device": where}
    about |= {"torch": torch.__version__, "right": shares, "examined": EXAMINED}
    (folder / "training.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {folder}/bf16 and {folder}/fp8")


def _parse(arguments: list[str] | None) -> tuple[Path, Recipe, torch.device]:
    parser = argparse.ArgumentParser("python -m rocmega.models.glm.training", description=__doc__)
    parser.add_argument("folder", type=Path, help="where bf16/, fp8/ and training.json go")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(Recipe):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    given = vars(parser.parse_args(arguments))
    return (
        given.pop("folder"),
        Recipe(**{k: v for k, v in given.items() if k != "device"}),
        torch.device(given["device"]),
    )


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{task} {share:.1%}" for task, share in shares.items())


if __name__ == "__main__":
    main()
