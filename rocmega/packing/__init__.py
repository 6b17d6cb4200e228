"""Packs: a checkpoint's weights as one rank's kernels read them, on disk."""
