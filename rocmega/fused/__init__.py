"""Triton kernels of the fused standard path: what an engine would launch for a decode step, one file per kernel.

They read the packed weights and the paged cache as they lie, and nothing here waits for the host, so that a step can be
captured as a graph. Importing a module of this package needs Triton.
"""
