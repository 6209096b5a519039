"""What a rank imports anyway before its first step, imported once for all of them."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import logging
import sys
import weakref
from typing import Any

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
    _spare_the_end()
    gc.collect()
    gc.freeze()


def _spare_the_end() -> None:
    """Have the interpreter's end leave what is imported alone, in this process and in those that are forked from it.

    It would clear module by module, and so copy nearly all of their memory only to free it.
    What a program made itself ends as ever: its objects are deleted, its files written.
    """
    mine = {"__main__", *sys.stdlib_module_names}  # what ends late may still import parts of the standard library
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] not in mine}
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))
    # Finalizers come after what programs register with atexit, and the oldest of them comes last.
    nothing: dict[str, Any] = dict.fromkeys(modules)
    weakref.finalize(sys, lambda: sys.modules.update(nothing))
