"""Torchscript."""
