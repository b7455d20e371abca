"""Supernet."""
