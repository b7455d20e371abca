"""Real checkpoints of published supernet families, as `subnetact` supernets."""

from ofa_adapters.registry import encode, families, identify, load

__all__ = ["encode", "families", "identify", "load"]
