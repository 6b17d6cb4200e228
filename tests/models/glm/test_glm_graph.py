"""What CUDA graphs, HIP graphs and torch.compile ask of the standard path's step, checked without any of them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rocmega.compare import Options
from rocmega.compare.subject import Subject

# Operators whose result's shape or value the host has to wait for.
WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::unique", "aten::masked_select")


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject.open(Options(format="fp8", rows=(3,), contexts=(70,), device="host"))


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.add(operator._schema.name)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("context", [20, 70])
def test_a_step_does_not_wait_for_the_device(subject, context):
    path = subject.standard(resident=False)
    placed = path.place(subject.batch(3, context))
    with Operators() as seen:
        path.run(*placed)
    assert "aten::index" in seen.names
    assert not seen.names & set(WAITING)


def test_layers_of_a_kind_share_a_compilation(subject):
    path = subject.standard(resident=False)
    batch = subject.batch(3, 70)
    expected = path.decode(batch)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    path._layer = torch.compile(path._layer, dynamic=False, fullgraph=True, backend=backend)
    assert torch.equal(path.decode(batch), expected)
    config = subject.model.config
    kinds = set(zip(config.dense_layers, config.full_index, strict=True))
    assert len(graphs) <= len(kinds) + 1  # the first layer has no selection before it
