"""Launchers that start one process for each rank: under them there would be a supervisor for each rank."""

from __future__ import annotations

from collections.abc import Mapping

_SIZES = (
    # variable, who sets it, how it starts a single process
    ("SLURM_STEP_NUM_TASKS", "srun", "srun --nodes=1 --ntasks=1 python train.py"),
    ("OMPI_COMM_WORLD_SIZE", "mpirun", "mpirun -n 1 python train.py"),
    ("PMI_SIZE", "mpirun", "mpirun -n 1 python train.py"),
    ("MV2_COMM_WORLD_SIZE", "mpirun", "mpirun -n 1 python train.py"),
    ("JSM_NAMESPACE_SIZE", "jsrun", "jsrun -n 1 python train.py"),
    ("WORLD_SIZE", "another launcher", "python train.py"),
)
_TORCHRUN = ("WORLD_SIZE", "torchrun", "torchrun --nproc-per-node 1 train.py")
_SLURM = ("SLURM_NTASKS", "srun", "srun --nodes=1 --ntasks=1 python train.py")
_SLURM_SHELLS = ("bash", "interactive")  # names of jobs in which a shell runs, as Lightning knows them


def other_launcher(environ: Mapping[str, str]) -> str | None:
    """Return what is wrong if this process is one of several that a launcher started, else None."""
    sizes = [*([_TORCHRUN] if "TORCHELASTIC_RUN_ID" in environ else []), *_SIZES]
    if "SLURM_STEP_NUM_TASKS" not in environ and environ.get("SLURM_JOB_NAME") not in _SLURM_SHELLS:
        sizes.append(_SLURM)
    for variable, launcher, remedy in sizes:
        value = environ.get(variable, "")
        if value.isdecimal() and int(value) > 1:
            return (
                f"`FTStrategy` starts and watches its own ranks, on one machine, but this process is one of {value} that"
                f" {launcher} started (`{variable}={value}`). Start a single one, for example with `{remedy}`, and ask"
                f" for the ranks with `Trainer(devices={value})`."
            )
    return None
