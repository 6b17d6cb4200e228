"""What CUDA graphs, HIP graphs and torch.compile ask of the standard path's step, checked without any of them."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rocmega.compare import Options
from rocmega.compare.subject import Subject
from rocmega.errors import RequestError
from rocmega.step import StepBatch
from tests.models.deepseek.conftest import FAMILIES

# Operators for whose result's shape or value the host has to wait, or that copy something from it.
WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::unique", "aten::masked_select", "aten::bincount",
    "aten::lift_fresh",
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request) -> Subject:
    return Subject.open(Options(request.param, format="mxfp4", rows=(3,), contexts=(20, 70), device="host"))


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.add(operator._schema.name)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("context", [20, 63, 64, 70])  # 64 ends entries of every ratio, 63 only those of one token
def test_a_step_does_not_wait_for_the_device(subject, context):
    path = subject.standard(resident=False)
    placed = path.place(subject.batch(3, context))
    path.run(*placed)  # what is brought to a device once is there
    with Operators() as seen:
        path.run(*placed)
    assert "aten::index" in seen.names
    assert not seen.names & WAITING


def test_layers_of_a_kind_share_a_compilation():
    subject = Subject.open(
        Options("deepseek-v4.1-flash-tiny", format="mxfp4", rows=(3,), contexts=(70,), device="host")
    )
    path = subject.standard(resident=False)
    batch = subject.batch(3, 70)
    expected = path.decode(batch)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    path._layer = torch.compile(path._layer, dynamic=False, fullgraph=True, backend=backend)
    assert torch.equal(path.decode(batch), expected)
    kinds = {
        (layer.compressed and layer.compressed.ratio, layer.makes_entries, layer.selects, layer.bound, layer.hashed)
        for layer in path.layers
    }
    assert len(graphs) == len(kinds) <= 8  # which is as many as torch makes before it gives up


def test_rows_of_one_request_are_no_step(subject):
    batch = subject.batch(2, 20)
    batch = StepBatch(batch.tokens, batch.positions, batch.block_table[[0, 0]])
    with pytest.raises(RequestError, match="of one request"):
        subject.standard().place(batch)
