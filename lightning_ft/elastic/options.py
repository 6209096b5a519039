"""What a user can choose about supervision, checked once, here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

from lightning_ft.elastic.checks import check_choice, check_count, check_seconds
from lightning_ft.elastic.protocol import Options

StartMethod = Literal["auto", "fork", "spawn"]
LostStreams = Literal["leave", "take_over", "stop"]


@dataclass(frozen=True, kw_only=True)
class SupervisionOptions:
    """How the supervisor starts, watches and ends ranks; the rarer choices.

    Args:
        restart_window: Seconds after which a respawn no longer counts against ``max_restarts``.
        rejoin_timeout: Seconds to wait for respawns while fewer than ``min_replicas`` are alive.
        setup_timeout: Seconds that a process may keep the others waiting until its first step, which may compile the
            model; also how long a respawned one may take until it can join. None: 30 minutes, or `timeout` if that is
            longer, or five times as long as it ever took.
        checkpoint_timeout: The same while it writes a checkpoint or hands over its state.
        stall_timeout: Seconds after which the job ends if most ranks do not move. Storage that stalls is no rank's fault,
            so nobody is killed for it before.
        grace: Seconds between a forwarded SIGTERM or SIGINT and SIGKILL.
        start_method: "fork": ranks are forked from a process that imported torch and lightning; "spawn": they start
            from nothing; "auto": forked where that is safe.
        lost_streams: What becomes of data that only its own rank reads (an iterable dataset) when that rank is away and the
            others are through with theirs. "leave": it is not trained in that epoch; "take_over": the others read it from
            where it was, numbered as that rank. They must get the same from there as it would. "stop": the job saves a
            checkpoint from which the epoch goes on, and ends with an error; `min_replicas` has the others wait before.
        prefix_output: Whether each line of a rank's output names its slot; None: unless the output is a terminal.

    Raises:
        TypeError: If a value is of the wrong type.
        ValueError: If a value is out of range.

    """

    restart_window: float = 600.0
    rejoin_timeout: float = 300.0
    setup_timeout: float | None = None
    checkpoint_timeout: float | None = None
    stall_timeout: float = 7200.0
    grace: float = 30.0
    start_method: StartMethod = "auto"
    lost_streams: LostStreams = "leave"
    prefix_output: bool | None = None

    def __post_init__(self) -> None:
        call = "SupervisionOptions"
        for name in ("restart_window", "rejoin_timeout", "grace"):
            check_seconds(call, name, getattr(self, name), zero=True)
        for name in ("setup_timeout", "checkpoint_timeout"):
            check_seconds(call, name, getattr(self, name), none=True)
        check_seconds(call, "stall_timeout", self.stall_timeout)
        check_choice(call, "start_method", self.start_method, get_args(StartMethod))
        check_choice(call, "lost_streams", self.lost_streams, get_args(LostStreams))
        check_choice(call, "prefix_output", self.prefix_output, (True, False, None))


@dataclass(frozen=True, kw_only=True)
class Policy(SupervisionOptions):
    """Everything the membership is decided by: the user's options plus the strategy's own arguments.

    Args:
        max_restarts: Respawns of one slot within ``restart_window``; 0: never respawn.
        min_replicas: Replicas that must be whole for steps to be taken.
        timeout: Seconds that a rank may keep the others waiting in a step or a callback; None: learned.
        spares: Processes that wait to take a dead rank's place.
        shard_size: How many ranks hold one copy of the model together; "all": all live ones.
        tensor_parallel_size: How many of these work on one batch together; above 1, slots keep their places in replicas.

    Raises:
        TypeError: If a value is of the wrong type.
        ValueError: If a value is out of range.

    """

    max_restarts: int = 3
    min_replicas: int = 1
    timeout: float | None = None
    spares: int = 0
    shard_size: int | Literal["all"] = 1
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        call = "FTStrategy"
        check_count(call, "max_restarts", self.max_restarts)
        check_count(call, "min_replicas", self.min_replicas, least=1)
        check_seconds(call, "timeout", self.timeout, none=True)
        check_count(call, "spares", self.spares)
        if self.shard_size != "all":
            check_count(call, "shard_size", self.shard_size, least=1)
        if self.spares and not self.max_restarts:
            raise ValueError(
                f"`FTStrategy(spares={self.spares}, max_restarts=0)` is not valid: a rank that dies stays away, so"
                " that spares would wait for ever. Use `spares=0`, or `max_restarts` of 1 or more."
            )

    @classmethod
    def of(
        cls,
        options: SupervisionOptions,
        *,
        max_restarts: int,
        min_replicas: int,
        timeout: float | None = None,
        spares: int = 0,
        shard_size: int | Literal["all"] = 1,
    ) -> Policy:
        """Return ``options`` with the strategy's arguments added."""
        own = asdict(options)
        return cls(
            **own,
            max_restarts=max_restarts,
            min_replicas=min_replicas,
            timeout=timeout,
            spares=spares,
            shard_size=shard_size,
        )

    def to_message(self) -> Options:
        """Return the message that tells the supervisor."""
        return cast(Options, {"type": "options", **asdict(self)})

    @classmethod
    def from_message(cls, message: Options) -> Policy:
        """Return what a rank said; fields that this version does not know are ignored."""
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {name: value for name, value in message.items() if name in known}
        return cls(**values)
