"""Fault tolerance for PyTorch Lightning: training that outlives the death of any rank."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_ft.elastic.options import SupervisionOptions
from lightning_ft.sharding.options import ShardingOptions
from lightning_ft.strategies import FTStrategy

__version__ = "0.1.0"
__all__ = ["FTStrategy", "ShardingOptions", "SupervisionOptions"]

FTStrategy.register_strategies(StrategyRegistry)
