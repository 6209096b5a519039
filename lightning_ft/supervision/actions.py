"""What the membership decides, for the supervisor to carry out."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_ft.elastic.protocol import FromSupervisor


@dataclass(frozen=True)
class Send:
    """Send ``message`` to the rank in ``slot``."""

    slot: int
    message: FromSupervisor


@dataclass(frozen=True)
class Spawn:
    """Start a rank in ``slot``."""

    slot: int
    incarnation: int


@dataclass(frozen=True)
class Signal:
    """Send ``number`` to the process in ``slot``; SIGKILL is how ranks are removed."""

    slot: int
    number: int


@dataclass(frozen=True)
class Ask:
    """Ask the rank in ``slot`` what it does, and the kernel whether it is stopped."""

    slot: int


@dataclass(frozen=True)
class Show:
    """Show the user a traceback that a rank sent instead of printing it."""

    slot: int
    traceback: str


@dataclass(frozen=True)
class Notice:
    """Tell the user one line."""

    text: str


@dataclass(frozen=True)
class Record:
    """Write one event to the log."""

    event: str
    fields: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Finish:
    """All processes are gone: exit with ``code``, telling ``error`` if there is one."""

    code: int
    error: str | None


Action = Send | Spawn | Signal | Ask | Show | Notice | Record | Finish
