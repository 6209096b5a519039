"""What the user's process must be like to become the supervisor of its own command, and what it hands on to the ranks."""

import multiprocessing
import os
import sys
from typing import Any

import torch.distributed
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ft.supervision.command import split

_DEBUGGERS = (["-m", "pdb"], ["-m", "ipdb"], ["-m", "debugpy"])


def check_takeover(num_slots: int) -> None:
    """Refuse where the command of this process cannot be run again for each rank.

    Raises:
        MisconfigurationException: Says why, and what to do instead.

    """
    where, advice = _obstacle() or ("", "")
    if where:
        raise MisconfigurationException(
            f"`FTStrategy` with `devices={num_slots}` can't start ranks from within {where}: each rank runs the program's"
            f" command again. {advice.format(n=num_slots)}"
        )


_USE_A_SCRIPT = (
    "Put the training into a script and start it with `python train.py` or `lightning-ft run -n {n} train.py`,"
    " or use `devices=1`."
)


def _obstacle() -> tuple[str, str] | None:
    """Return what is in the way, and what to do about it."""
    _, program = split(getattr(sys, "orig_argv", [""]))
    if "pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        return "pytest", _USE_A_SCRIPT
    # While such a process imports the script, it does not yet say that it has a parent.
    imports_main = program[:1] == ["-c"] and program[1].startswith("from multiprocessing.")
    if imports_main or multiprocessing.parent_process() is not None:
        return (
            "a process that `multiprocessing` started",
            "If it only imported the script again, as the workers of a DataLoader do that are spawned, protect the script's"
            " entry with `if __name__ == '__main__':`. Otherwise start the training in a process of its own with"
            " `lightning-ft run -n {n} train.py`, or use `devices=1`.",
        )
    if hasattr(sys, "ps1") or sys.flags.interactive or "ipykernel" in sys.modules:
        return "an interactive session", _USE_A_SCRIPT
    if program[:2] in _DEBUGGERS or "pydevd" in sys.modules:
        return (
            "a debugger",
            "Use `devices=1`, or call `breakpoint()` in one rank of a job without a debugger: `if trainer.is_global_zero:"
            " breakpoint()`. `FTStrategy(timeout=...)` says how long the others wait for it.",
        )
    if not program or program[0] == "-":
        return "a program that was read from stdin", _USE_A_SCRIPT
    if torch.distributed.is_initialized():
        return (
            "a process that takes part in a process group",
            "An earlier Trainer of this script, with another strategy, or a call of `init_process_group` made it. Put the"
            " training under `FTStrategy` into a script of its own, and start it with `python train.py`.",
        )
    return None


def hydra_overrides() -> list[str]:
    """Return arguments by which a Hydra app that runs again writes where this process does, and not into a new directory."""
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return []
    config: Any = module.HydraConfig.get()
    if config.mode is not None and config.mode.name == "MULTIRUN":
        return [f"hydra.sweep.dir={_quote(os.path.join(config.runtime.cwd, config.sweep.dir))}"]
    return [f"hydra.run.dir={_quote(config.runtime.output_dir)}", "hydra.output_subdir=null"]


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
