"""The trained model that comes with rocmega: right on both paths, no further off than its number formats explain."""

from __future__ import annotations

import math

import pytest
import torch

from rocmega.checkpoint import Checkpoint
from rocmega.checkpoint.layouts import read_matrix
from rocmega.checkpoint.quantize import quantize_mxfp4
from rocmega.checkpoint.tiles import dequantize_mxfp4
from rocmega.eval.puzzles import TASKS
from rocmega.eval.run import STORED, Arm, Report, evaluate
from rocmega.eval.statistics import Answer, pair
from rocmega.models.glm.training import SHIPPED

EACH = 2
LEARNED = len(TASKS) - 1  # all but recall
EXACT, FP8, MXFP4, MEGA = "f32", STORED, "mxfp4", "mega"
LAYERS, ROUNDED = 4, 8  # inputs of the matrices of attention and of experts, rounded to bf16 in each layer


@pytest.fixture(scope="module")
def reports() -> tuple[Report, Report]:
    standard = evaluate(SHIPPED, each=EACH, formats=(EXACT, FP8, MXFP4), paths=("standard",), device="host")
    return standard, evaluate(SHIPPED, each=EACH, paths=("mega",), device="host")


@pytest.fixture(scope="module")
def arms(reports) -> dict[str, Arm]:
    standard, mega = reports
    return {arm.format: arm for arm in standard.arms} | {MEGA: mega.arms[0]}


def distance(first: list[Answer], second: list[Answer]) -> float:
    """Root mean square of the logits' differences, over that of the first's logits around their mean.

    Over tokens with the same ones before them.
    """
    differences, spreads = [], []
    for a, b in zip(first, second, strict=True):
        pairs = zip(a.token_ids, b.token_ids, strict=False)
        shared = next((at + 1 for at, (x, y) in enumerate(pairs) if x != y), min(len(a.token_ids), len(b.token_ids)))
        differences.append(a.logits[:shared] - b.logits[:shared])
        spreads.append(a.logits[:shared] - a.logits[:shared].mean(-1, keepdim=True))
    return float(torch.cat(differences).norm() / torch.cat(spreads).norm())


def test_every_arm_knows_the_answers(reports, arms):
    """98.7 % of 3200 learned puzzles were right after training: of 16, three wrong ones are one chance in 800."""
    assert arms[MEGA].coverage == 1
    for name, arm in arms.items():
        right = reports[0].right_by_task(arm)
        learned = sum(count for task, count in right.items() if task != "recall")
        assert learned >= LEARNED * EACH - 2, (name, right)


def test_the_paths_differ_less_than_rounding_does(arms):
    """Both round activations to bf16 in the same places and sum up in float32, in other orders.

    So they are nearer to each other than to the same weights with nothing rounded, and give the same answers.
    """
    paths = pair("standard", arms[FP8].answers, "mega", arms[MEGA].answers)
    assert paths.same == paths.asked
    assert 0 < distance(arms[FP8].answers, arms[MEGA].answers) < distance(arms[EXACT].answers, arms[FP8].answers)


@pytest.mark.parametrize("name", [FP8, MEGA])
def test_fp8_weights_cost_no_more_than_rounded_activations(arms, name):
    """FP8 weights count at their very values: what differs from float32 is that activations are rounded to bf16.

    Half a unit is 2^-9; evenly distributed, 2^-9 / sqrt(3) on average. The bound is as if all roundings on the way
    added up; as they are independent, their root is nearer.
    """
    bound = LAYERS * ROUNDED * 2**-9 / math.sqrt(3)
    assert 0 < distance(arms[EXACT].answers, arms[name].answers) < bound
    assert not pair("", arms[EXACT].answers, "", arms[name].answers).distinguishable


def test_mxfp4_experts_cost_no_more_than_their_own_error(arms):
    """A relative error e of three matrices one after the other is sqrt(3) e of what experts add to the stream.

    The stream has other parts, which are exact, so that is the most that should arrive. At least a tenth must: else
    nothing would have been quantized.
    """
    checkpoint = Checkpoint(SHIPPED)
    error = math.sqrt(3) * max(quantization_error(checkpoint, part) for part in ("gate", "up", "down"))
    assert error / 10 < distance(arms[EXACT].answers, arms[MXFP4].answers) < error
    assert not pair("", arms[EXACT].answers, "", arms[MXFP4].answers).distinguishable


def quantization_error(checkpoint: Checkpoint, part: str) -> float:
    """Of an expert's matrix put into MXFP4, relative, by Frobenius norms."""
    value = read_matrix(checkpoint, f"model.layers.1.mlp.experts.3.{part}_proj.weight").dequantize()
    return float((dequantize_mxfp4(*quantize_mxfp4(value)) - value).norm() / value.norm())
