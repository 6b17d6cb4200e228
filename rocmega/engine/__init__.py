"""Continuous batching over a loaded model."""

from rocmega.engine.engine import Engine as Engine
from rocmega.engine.request import Request as Request
