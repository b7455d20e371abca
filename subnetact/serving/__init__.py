"""Deadline-aware batching, scheduling policies and a simulator. Nothing here imports torch."""
