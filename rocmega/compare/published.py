"""What others published for the same model, per layer, to be shown beside our figures with what differs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A figure that we did not measure. us_per_layer: of layers without and with an indexer of their own."""

    what: str
    model: str
    us_per_layer: tuple[float, float]
    rows: int
    context: int
    tp: int
    bandwidth: float  # of its memory by the maker's data sheet, bytes per second
    footnote: str


FIGURES = (
    Published(
        what="one kernel a layer (FlyDSL, for vLLM), MI355X",
        model="glm-5.2",
        us_per_layer=(37.5, 53.9),
        rows=1,
        context=3000,
        tp=8,
        bandwidth=8.0e12,
        footnote=(
            "Published for AMD Instinct MI355X (8 TB/s by its data sheet), not measured here: a layer of GLM-5.2 on 8 "
            "GPUs, one row, context 3,000, HIP graph of 16 layer calls, median of the ranks; FP8 blocks with MXFP4 "
            "experts, bf16 cache; without / with an indexer. It leaves out embedding, head and sampling, which ours "
            "includes. The devices' bandwidths differ: compare percentages of bandwidth, not only times."
        ),
    ),
)
