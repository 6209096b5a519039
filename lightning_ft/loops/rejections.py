"""The report of what was rejected: rows, counts, lines of the log, metrics and events."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer

from lightning_ft.loops.window import MicroBatch
from lightning_ft.rerun.findings import Finding
from lightning_ft.rerun.states import RerunDiagnostic

log = logging.getLogger(__name__)

_MAX_ROWS = 1000
_MAX_TEXT = 200


class Rejections:
    """What was rejected in a training, and what was done about it."""

    def __init__(self) -> None:
        self.rows: deque[dict[str, Any]] = deque(maxlen=_MAX_ROWS)
        self.replays: deque[dict[str, Any]] = deque(maxlen=_MAX_ROWS)
        """What came out when steps before were run again."""
        self.counts = {"rejections": 0, **{diagnostic.value: 0 for diagnostic in RerunDiagnostic}}

    def report(
        self,
        trainer: Trainer,
        findings: Sequence[Finding],
        micro_batches: Sequence[MicroBatch],
        action: str,
        found: Mapping[str, Any] | None = None,
    ) -> None:
        """Tell what was rejected in the step under way.

        Args:
            trainer: The trainer.
            findings: What was rejected, on all ranks.
            micro_batches: Those of the step.
            action: What becomes of the step.
            found: What came out when the steps before it were run again.

        """
        batches = [micro_batch.arguments["batch_idx"] for micro_batch in micro_batches]
        events = getattr(trainer.strategy, "events", None)
        members = getattr(trainer.strategy, "members", range(trainer.world_size))
        for finding in findings:
            verdict = "undecided" if finding.diagnostic is None else finding.diagnostic.value
            row: dict[str, Any] = {
                "step": trainer.global_step + 1,
                "epoch": trainer.current_epoch,
                "batch_idx": batches[-1 if finding.micro_batch is None else finding.micro_batch],
                "rank": finding.rank,
                "of_slot": members[finding.rank] if finding.rank < len(members) else None,
                "name": finding.message,
                "value": _told(finding.value),
                "rerun_value": _told(finding.rerun_value),
                "expected": finding.expected,
                "verdict": verdict,
                "action": "rerun" if finding.diagnostic == RerunDiagnostic.TRANSIENT_ERROR else action,
            }
            if found is not None and found["began"] is not None:
                row |= {"since_step": found["began"], "since_ranks": found["ranks"]}
            self.rows.append(row)
            self.counts["rejections"] += 1
            self.counts[verdict] = self.counts.get(verdict, 0) + 1
            if trainer.is_global_zero:
                log.warning("%s", describe(row))
                if events is not None:
                    events.emit("rejection", **row)
        metrics = {f"ft/{name}": float(count) for name, count in self.counts.items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)


def describe(row: Mapping[str, Any]) -> str:
    """Return a line that says what was rejected, what it turned out to be, and what was done about it."""
    expected = f", expected {row['expected']}" if row["expected"] else ""
    again = "" if row["rerun_value"] is None else f", run again {_short(row['rerun_value'])}"
    since = ""
    if "since_step" in row:
        since = f"; something is wrong since step {row['since_step']} on rank {', '.join(map(str, row['since_ranks']))}"
    verdict, action = (str(row[name]).replace("_", " ") for name in ("verdict", "action"))
    return (
        f"Step {row['step']} (batch {row['batch_idx']} of epoch {row['epoch']}): {row['name']} on rank {row['rank']}:"
        f" {_short(row['value'])}{expected}{again}; {verdict}, {action}{since}."
    )


def _told(value: Any) -> float | str | None:
    """Return a number as it is, and what is of the user's own kind in words."""
    return value if value is None or isinstance(value, float | int) else " ".join(str(value).split())[:_MAX_TEXT]


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float | int) else str(value)
