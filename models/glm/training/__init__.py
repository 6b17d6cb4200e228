"""Training of a small GLM on puzzles, from nothing to a checkpoint in the published format.

    python -m rocmega.models.glm.training FOLDER

makes FOLDER/bf16 and FOLDER/fp8, in under four minutes on an H200. It is as much of training as a model needs that the
decode paths can be examined with; it is no trainer.
"""

from pathlib import Path

SHIPPED = Path(__file__).resolve().parents[1] / "glm-5.2-puzzles"
"""The FP8 checkpoint that this made; it comes with the package. Its README says how good it is."""
