"""Accuracy: the two paths, and the formats of a model's weights, on the same prompts with known answers."""
