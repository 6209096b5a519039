"""Dumps of what a training computes: written beside it, there whole or not at all, and compared with others."""

from lightning_ft.dump.values import dump

__all__ = ["dump"]
