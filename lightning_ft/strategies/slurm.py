"""A SLURM job that starts again by itself: where its checkpoint lies, and how SLURM is asked."""

import logging
import os
import subprocess

from lightning.pytorch import Trainer

log = logging.getLogger(__name__)


def checkpoint_path(trainer: Trainer) -> str:
    """Return the file that Lightning resumes from when SLURM starts the job again; always the same one."""
    known = trainer._checkpoint_connector._hpc_resume_path
    return known or os.path.join(trainer.default_root_dir, "hpc_ckpt_1.ckpt")


def requeue() -> None:
    """Ask SLURM to start this job again."""
    environ = os.environ
    job = environ.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in environ:
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
        problem = done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""
    except OSError as error:
        problem = str(error)
    if problem:
        log.warning("SLURM job %s was not requeued (%s); its checkpoint is there, start it again by hand.", job, problem)
    else:
        log.info("Requeued SLURM job %s.", job)
