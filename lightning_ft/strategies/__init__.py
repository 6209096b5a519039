"""Strategies for ``Trainer(strategy=...)``."""

from lightning_ft.strategies.ft import FTStrategy

__all__ = ["FTStrategy"]
