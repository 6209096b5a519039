"""Test your own training under faults: plan them, run the job with real processes, and check what is left.

Example::

    plan = FaultPlan([Fault(kind="kill", slot=1, point="gradients_ready", step=10)])
    job = run_job("train.py", num_slots=4, faults=plan).check()  # the script adds `FaultPlan.from_environ()`
    assert_used_up(plan)
    assert_every_ticket_once(job.events)

"""

from lightning_ft.dump.diff import assert_dumps_equal
from lightning_ft.testing.assertions import (
    assert_every_ticket_once,
    assert_metrics_equal,
    assert_no_violations,
    assert_reconfigurations,
    assert_recovered,
    assert_steps_contiguous,
    assert_used_up,
    assert_weights_equal,
    fingerprint,
)
from lightning_ft.testing.corruption import Corruption, Corruptions
from lightning_ft.testing.fault_plan import FaultPlan
from lightning_ft.testing.faults import Fault
from lightning_ft.testing.jobs import JobResult, read_newest_run, run_job, run_ranks, run_without_supervisor
from lightning_ft.testing.processes import end_process

__all__ = [
    "Corruption",
    "Corruptions",
    "Fault",
    "FaultPlan",
    "JobResult",
    "assert_dumps_equal",
    "assert_every_ticket_once",
    "assert_metrics_equal",
    "assert_no_violations",
    "assert_reconfigurations",
    "assert_recovered",
    "assert_steps_contiguous",
    "assert_used_up",
    "assert_weights_equal",
    "end_process",
    "fingerprint",
    "read_newest_run",
    "run_job",
    "run_ranks",
    "run_without_supervisor",
]
