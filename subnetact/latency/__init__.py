"""Latency."""
