"""What a rank imports anyway before its first step, imported once for all of them."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging

log = logging.getLogger(__name__)

# The second half is imported lazily, by the first optimizer step or the first fit.
MODULES = (
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "lightning.pytorch",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "omegaconf",
    "torchmetrics",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.profiler._cupti_monitor",
    "torch.utils.tensorboard",
    "fsspec.implementations.chained",
    "rich._emoji_codes",
    "s3fs",  # where it is installed: Lightning imports it when it looks whether a path is a directory
)
_STARTS_THREADS = "tensorflow"  # imported by torch.utils.tensorboard where it is installed


def preload() -> None:
    """Import them, and keep the garbage collector from touching (and thereby copying) them in forked processes."""
    for name in MODULES:
        if name == "torch.utils.tensorboard" and importlib.util.find_spec(_STARTS_THREADS) is not None:
            continue
        try:
            importlib.import_module(name)
        except ImportError as error:
            log.debug("Not preloaded: %s (%s).", name, error)
    gc.collect()
    gc.freeze()
