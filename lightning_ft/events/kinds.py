"""The kinds of events: what each of them tells, in which fields, and of which types.

Whoever emits an event of a new kind adds it here. Unknown kinds are no error, they are the user's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Type = Any
"""A type, or a union of types: what `isinstance` takes."""

_NUMBER: Type = float | int


@dataclass(frozen=True)
class Kind:
    """What an event tells.

    Args:
        told: In words.
        fields: That it always has, beside ``t``, ``event``, ``slot`` and ``incarnation``.
        optional: Further ones that it may have.
        open: Whether it may have any others; their values are numbers.

    """

    told: str
    fields: Mapping[str, Type] = field(default_factory=dict)
    optional: Mapping[str, Type] = field(default_factory=dict)
    open: bool = False

    def mismatch(self, record: Mapping[str, Any]) -> str | None:
        """Return what is wrong with the fields of ``record``, or None."""
        for name, expected in self.fields.items():
            if name not in record:
                return f"has no `{name}`"
            if not isinstance(record[name], expected):
                return f"has {name}={record[name]!r}"
        for name, expected in self.optional.items():
            if name in record and not isinstance(record[name], expected):
                return f"has {name}={record[name]!r}"
        return None


STAMP: Mapping[str, Type] = {"t": _NUMBER, "event": str, "slot": int | None, "incarnation": int}
"""What every event has."""

_TEXT: Type = str | None
_CONTENT: Mapping[str, Type] = {"epoch": int, "tickets": dict, "members": list}

KINDS: Mapping[str, Kind] = {
    # Processes.
    "run": Kind("a job began", {"run_id": str, "num_slots": int, "pid": int}),
    "spawn": Kind("a process was started in a slot", {"pid": int}),
    "start": Kind("a rank is there", {"pid": int}),
    "spare": Kind("a spare was started", {"pid": int}),
    "spare_exit": Kind("a spare ended", {"pid": int, "code": int}),
    "exit": Kind("a rank's process ended", {"how": str, "code": int, "member": bool}, {"ago": _NUMBER}),
    "hung": Kind("a rank kept the others waiting and was killed", {"how": str, "stacks": str}),
    "stall": Kind("nothing moves, and it is no rank's fault", {"message": str}),
    "excluded": Kind("a slot stays out", {"restarts": int}),
    "exception": Kind("a rank raised", {"type": str, "message": str}),
    "stop": Kind("the job is to end", {"code": int, "error": _TEXT}),
    "finish": Kind("the job ended", {"code": int, "error": _TEXT}),
    "control": Kind(
        "somebody asked the supervisor for something",
        {"command": str, "accepted": bool, "answer": str},
        {"target": int | None, "kind": _TEXT, "uid": int},
    ),
    # Membership.
    "generation": Kind(
        "the members changed: published by the supervisor, or adopted by a rank",
        {"members": list, "reason": str, "dead": list},
        {"number": int, "generation": int, "joined": list, "stall_ms": _NUMBER, "sequence": int, "replayed": bool}
        | {"replicas": list, "orphans": list, "ending": bool, "incarnations": dict, "hold": bool},
    ),
    "generation_failed": Kind("a new generation broke before it was used", {"generation": int, "error": str}),
    "operation_failed": Kind("a collective broke", {"operation": str, "sequence": int, "error": str}),
    "orphaned": Kind("a rank lost its replica", {"sequence": int}),
    "retired": Kind("a rank can't go on with another replica", {"sequence": int}),
    "leader": Kind("a rank became rank 0", {"before": int}),
    "join_requested": Kind("a rank is ready to join"),
    "handing_out": Kind("a rank begins to send its state", {"to": list}),
    "handed_out": Kind("a rank sent its state", {"to": list, "bytes": int, "ms": _NUMBER}),
    "healed": Kind("a joiner received the state", {"source": int}),
    "admitted": Kind("members let joiners in", {"joined": list, "ms": _NUMBER}),
    "joined": Kind("a joiner takes part", {"step": int, "epoch": int}),
    # Training.
    "fit": Kind("a fit begins"),
    "fit_end": Kind("a fit ended", {"step": int, "epoch": int, "whole": bool}),
    "step": Kind("an optimizer step was committed", {"step": int}, _CONTENT),
    "accumulated": Kind("a batch was trained of which no step is made yet", {"batch": int, **_CONTENT}),
    "begun_anew": Kind("no rank was left that held the state: all begin the call again", {"call": int, "step": int}),
    "rewound": Kind("all ranks went back to a snapshot", {"step": int, "batch": int, "lost": int}, {"ms": _NUMBER}),
    "checksum": Kind("what a rank holds after a step", {"step": int, "digest": str}, {"shard": str}),
    "corruption": Kind("ranks hold different states", {"step": int, "differing": dict, "action": str}),
    "rejection": Kind(
        "a value of a step was rejected",
        {"step": int, "epoch": int, "batch_idx": int, "rank": int, "name": str, "verdict": str, "action": str},
        {"value": object, "rerun_value": object, "expected": str, "since_step": int, "since_ranks": list}
        | {"of_slot": int | None},
    ),
    "replay": Kind(
        "earlier steps were run again to find where values began to be wrong",
        {"step": int, "first": int, "began": int | None, "ranks": list, "what": _TEXT},
        {"value": _NUMBER | None, "replayed": _NUMBER | None, "names": list},
    ),
    "metrics": Kind("values of a step, the same on all ranks", {"step": int}, open=True),
    "verdict": Kind(
        "whether the training went on after a restart as before",
        {"step": int, "reason": str, "outcome": str, "series": str, "num_steps": int},
        {"usual": _NUMBER | None, "value": _NUMBER | None},
    ),
    "taken_back": Kind(
        "weights of an older checkpoint were loaded into the training", {"step": int, "to": int, "path": str}
    ),
    "straggler": Kind(
        "a rank is slower than the others for some time",
        {"straggler": int, "seconds": _NUMBER, "over_peers": _NUMBER, "since": int},
        {"over_past": _NUMBER | None},
    ),
    "goodput": Kind("where the time of the training went: seconds, and what was lost to what", {"step": int}, open=True),
    "incomplete": Kind(
        "values of a pass or an epoch lack the share of dead ranks",
        {"stage": str, "step": int, "slots": list},
    ),
    # Data.
    "epoch": Kind("an epoch begins", {"epoch": int, "num_tickets": int | None}, {"global_batch": int}),
    "streams_left": Kind("an epoch ends without streams of slots that are away", {"epoch": int, "batches": dict}),
    "streams_taken": Kind(
        "slots read from now on what nobody reads: by slot, whose stream", {"epoch": int, "streams": dict}
    ),
    # Checkpoints.
    "checkpoint": Kind(
        "a checkpoint is there",
        {"path": str, "step": int},
        {"replaces": list, "ms": _NUMBER, "stall_ms": _NUMBER, "weights_only": bool},
    ),
    "checkpoint_failed": Kind("a checkpoint was not committed", {"path": str, "step": int, "error": str}),
    "checkpoint_removed": Kind("a checkpoint was removed", {"path": str}),
    "resumed": Kind(
        "a training goes on from a checkpoint", {"path": str, "step": int}, {"run_id": str, "events": str, "attempt": int}
    ),
    # Drills, and the log itself.
    "fault": Kind("a fault of a plan", {"kind": str}, {"index": int, "point": str, "step": int}),
    "events_dropped": Kind("events that were lost before there was a directory", {"count": int}),
}


def mismatch(record: Mapping[str, Any]) -> str | None:
    """Return what is wrong with an event, as the end of a sentence, or None."""
    for name, expected in STAMP.items():
        if name not in record:
            return f"has no `{name}`"
        if not isinstance(record[name], expected):
            return f"has {name}={record[name]!r}"
    kind = KINDS.get(record["event"])
    return None if kind is None else kind.mismatch(record)


def as_words(record: Mapping[str, Any]) -> str:
    """Return an event as one line of ``key=value`` words, for grep and for logs."""
    return " ".join(f"{name}={_word(value)}" for name, value in record.items())


def _word(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else "-" if value is None else str(value)
    if isinstance(value, list | tuple) and all(isinstance(item, int) for item in value):
        text = ",".join(map(str, value))
    plain = text and not any(character in text for character in ' "=\n\r\t')
    return text if plain else json.dumps(text, ensure_ascii=False)
