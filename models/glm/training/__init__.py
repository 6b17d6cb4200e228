"""Training of a small GLM on puzzles, from nothing to a checkpoint in the published format.

    python -m rocmega.models.glm.training FOLDER

makes FOLDER/bf16 and FOLDER/fp8, in under four minutes on an H200. It is as much of training as a model needs that the
decode paths can be examined with; it is no trainer.
"""
