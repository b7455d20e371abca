"""Real checkpoints of published supernet families, as `subnetact` supernets."""

from ofa_adapters.registry import families, load

__all__ = ["families", "load"]
