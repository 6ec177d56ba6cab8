"""Images a second of the QSGD-MN paper's clusters: its performance model, and this project's collective in its place.

The paper (Vineeth S, "Quantization for Distributed Optimization", arXiv:2109.12497, sections 6.6 and 6.7) shows this in
Figures 11 to 14 for ResNet-50 and VGG-16 on CIFAR-10: up to 32 nodes with 4 V100 GPUs each, 128 images a GPU, 1 and 10
Gbit/s between nodes. Its text gives the parameters of both networks, K = 10,000 and the bits. The code, logs and plots
that its author published (github.com/vineeths96/Gradient-Compression) give a step's seconds on one GPU, the method's
own kernels included; the formula below; a latency of 9 ms, 200 GiB/s within a node, and 2^30 bits for a Gbit.

d: values of a network's gradient.
"""

from __future__ import annotations

import math
from typing import Any

from benchmarks.averages import Shapes, values_in
from pipecomp.allreduce import predict

GBIT = 2.0**30  # bits
LATENCY_S = 9e-3
NODE_BYTES_PER_S = 200 * 2.0**30
GPUS = 4  # of a node
BATCH = 128  # images of a GPU
K = 10_000
BITS = (2, 4, 8)
NAMES = {
    "none": "AllReduce",
    "qsgd_mn": "QSGD-MN",
    "qsgd_mn_ts": "QSGD-MN-TS",
    "grandk_mn": "GRandK-MN",
    "grandk_mn_ts": "GRandK-MN-TS",
}
STEP_S = {  # forward, backward, kernels and update on one V100
    "ResNet-50": {
        "none": 0.193603,
        "qsgd_mn": 0.198318,
        "qsgd_mn_ts": 0.204024,
        "grandk_mn": 0.195166,
        "grandk_mn_ts": 0.196936,
    },
    "VGG-16": {
        "none": 0.084416,
        "qsgd_mn": 0.087066,
        "qsgd_mn_ts": 0.090423,
        "grandk_mn": 0.085610,
        "grandk_mn_ts": 0.086943,
    },
}


def vgg16() -> Shapes:
    """Parameters of VGG-16 for CIFAR-10, with batch normalization and one linear layer."""
    shapes: list[tuple[int, ...]] = []
    channels = 3
    for width in (64, 64, 128, 128, *[256] * 3, *[512] * 6):
        shapes += [(width, channels, 3, 3), (width,), (width,), (width,)]
        channels = width
    return (*shapes, (10, channels), (10,))


def resnet50() -> Shapes:
    """Parameters of ResNet-50 for CIFAR-10: a 3 × 3 stem, four stages of bottlenecks."""
    shapes: list[tuple[int, ...]] = []

    def convolution(outputs: int, inputs: int, size: int) -> None:
        shapes.extend([(outputs, inputs, size, size), (outputs,), (outputs,)])

    convolution(64, 3, 3)
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(width, channels, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:
                convolution(4 * width, channels, 1)
            channels = 4 * width
    return (*shapes, (10, channels), (10,))


NETWORKS: dict[str, Shapes] = {"ResNet-50": resnet50(), "VGG-16": vgg16()}


def options(method: str, bits: int) -> dict[str, Any]:
    """The figures' settings: `bits` is the narrow scale's where there are two."""
    settings: dict[str, Any] = {}
    if method != "none":
        settings["bits"] = (bits, bits + 4) if method.endswith("_ts") else bits
    if method.startswith("grandk"):
        settings["k"] = K
    return settings


def papers_model(network: str, method: str, bits: int, nodes: int, bits_per_s: float) -> float:
    """The paper's images a second: every doubling of the nodes sends all bits of the gradient once more.

    It counts `bits` for each value, neither sums that need more nor the choice between two scales.
    """
    values = K if method.startswith("grandk") else values_in(NETWORKS[network])
    size = values * (32 if method == "none" else bits) / 8
    seconds = STEP_S[network][method] + _within_node(size)
    seconds += (LATENCY_S + 8 * size / bits_per_s) * math.log2(nodes)
    return BATCH * GPUS * nodes / seconds


def this_projects(network: str, method: str, bits: int, nodes: int, bits_per_s: float, *, ranks: str) -> float:
    """Images a second with the collective of pipecomp.allreduce, one bucket, nothing hidden behind the backward pass.

    ranks: "gpus", each a rank, with a quarter of its node's link (what stays within the node counts as if it crossed
    it); or "nodes", where gradients are averaged within a node first, uncompressed, as the paper's model has it.
    """
    d = values_in(NETWORKS[network])
    n, rate, before = nodes, bits_per_s, _within_node(4 * d)
    if ranks == "gpus":
        n, rate, before = GPUS * nodes, bits_per_s / GPUS, 0.0
    predicted = predict(method, d, n, bandwidth_bit_per_s=rate, latency_s=LATENCY_S, **options(method, bits))
    return BATCH * GPUS * nodes / (STEP_S[network][method] + before + predicted.total_s)


def _within_node(size: float) -> float:
    return size / NODE_BYTES_PER_S * math.log2(GPUS)
