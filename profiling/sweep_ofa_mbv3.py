"""Measures the latency of a Pareto set of OFA-MobileNetV3 (width 1.0) on this device.

    python profiling/sweep_ofa_mbv3.py [--device cuda] [--mode graphs] [any option of subnetact.profile]

Weights are random: they are as fast as trained ones, and accuracies are not known.
"""

import sys

from device_sweep import run

if __name__ == "__main__":
    sys.exit(run("ofa_mbv3", 224, ["--subnets", "20", "--batch-sizes", "1", "2", "4", "8"]))
