"""Measures the latency of a Pareto set of OFA-ResNet50 on this device.

    python profiling/sweep_ofa_resnet50.py [--device cuda] [--mode graphs] [any option of subnetact.profile]

Weights are random: they are as fast as trained ones, and accuracies are not known.
"""

import sys

from device_sweep import run

if __name__ == "__main__":
    sys.exit(run("ofa_resnet50", 96, ["--subnets", "20", "--batch-sizes", "1", "2", "4", "8"]))
