"""What the supervisor and its ranks say to each other, and what a rank's environment says of it.

Messages are JSON objects, the kind of message in the field ``type``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

SLOT = "LIGHTNING_FT_SLOT"
INCARNATION = "LIGHTNING_FT_INCARNATION"
NUM_SLOTS = "LIGHTNING_FT_NUM_SLOTS"
SUPERVISOR = "LIGHTNING_FT_SUPERVISOR"
STORE = "LIGHTNING_FT_STORE"
RUN_ID = "LIGHTNING_FT_RUN_ID"
MEMORY = "LIGHTNING_FT_MEMORY"

NO_SLOT = -1
"""What stands for the slot in the environment of a spare: it waits for one."""

Function = Literal["fit", "validate", "test", "predict"]
Reason = Literal["start", "death", "join", "error", "exclude", "cancelled"]
Mode = Literal["start", "again", "join", "skip"]
Doing = Literal["set-up", "loader", "training step", "evaluation step", "callbacks", "checkpoint", "hand-over"]


@dataclass(frozen=True)
class RankEnvironment:
    """What the supervisor tells a rank through its environment.

    Args:
        slot: The lasting identity of this rank's place; :data:`NO_SLOT` in a spare.
        incarnation: How often the slot was started before.
        num_slots: How many slots the job has.
        supervisor: Address of the control socket, for :func:`connect`.
        store: Address of the supervisor's store, for :class:`~lightning_ft.elastic.local_store.LocalStore`.
        run_id: Name of this job, the same in all ranks and incarnations.
        memory: Name of the supervisor's :class:`~lightning_ft.supervision.host_memory.HostMemory`.

    """

    slot: int
    incarnation: int
    num_slots: int
    supervisor: str
    store: str
    run_id: str
    memory: str = ""

    def to_environ(self) -> dict[str, str]:
        """Return the variables that say this."""
        return {
            SLOT: str(self.slot),
            INCARNATION: str(self.incarnation),
            NUM_SLOTS: str(self.num_slots),
            SUPERVISOR: self.supervisor,
            STORE: self.store,
            RUN_ID: self.run_id,
            MEMORY: self.memory,
        }

    @classmethod
    def of_process(cls) -> RankEnvironment | None:
        """Return which rank this process is, or None if it is none.

        Ranks lead their session. What a rank starts inherits its environment, but is not that rank: it may train alone,
        or be a job of its own.
        """
        return cls.from_environ(os.environ) if os.getsid(0) == os.getpid() else None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> RankEnvironment | None:
        """Return what ``environ`` says, or None in a process that is not a rank."""
        if SLOT not in environ:
            return None
        return cls(
            slot=int(environ[SLOT]),
            incarnation=int(environ[INCARNATION]),
            num_slots=int(environ[NUM_SLOTS]),
            supervisor=environ[SUPERVISOR],
            store=environ[STORE],
            run_id=environ[RUN_ID],
            memory=environ.get(MEMORY, ""),
        )


# Rank -> supervisor.


class Hello(TypedDict):
    """The first message of a rank."""

    type: Literal["hello"]
    slot: int
    incarnation: int
    pid: int


class Options(TypedDict):
    """What the user asked for in the next call: the fields of :class:`~lightning_ft.elastic.options.Policy`."""

    type: Literal["options"]
    max_restarts: int
    min_replicas: int
    timeout: float | None
    restart_window: float
    rejoin_timeout: float
    grace: float
    spares: int
    shard_size: int | Literal["all"]
    tensor_parallel_size: int
    start_method: Literal["auto", "fork", "spawn"]
    prefix_output: bool | None
    setup_timeout: float | None
    checkpoint_timeout: float | None
    stall_timeout: float
    lost_streams: str


class Park(TypedDict):
    """The spare stands before its ``call``-th Trainer call and waits for a slot."""

    type: Literal["park"]
    call: int


class Begin(TypedDict):
    """The rank stands at its ``call``-th Trainer call."""

    type: Literal["begin"]
    call: int
    fn: Function


class Join(TypedDict):
    """A joiner finished its private set-up and may be admitted."""

    type: Literal["join"]
    call: int


class Ready(TypedDict):
    """The rank left the generation before ``generation`` and waits for its go."""

    type: Literal["ready"]
    generation: int


class Failed(TypedDict):
    """An operation of ``generation`` failed here."""

    type: Literal["failed"]
    generation: int
    reason: str


class Retire(TypedDict):
    """The rank lost its replica and can't go on from where it stands: it is to be started again."""

    type: Literal["retire"]


class AtTop(TypedDict):
    """The rank waits at the step boundary that all members agreed on."""

    type: Literal["at_top"]
    generation: int


class Waiting(TypedDict):
    """The rank has waited for others for a while, in an operation of ``generation``."""

    type: Literal["waiting"]
    generation: int
    seconds: float


class Arrived(TypedDict):
    """What the rank said it waited for is there."""

    type: Literal["arrived"]
    generation: int


class Answer(TypedDict):
    """The answer to a query, from another thread than the one that trains: what that one does, since when, and where."""

    type: Literal["answer"]
    doing: Doing
    quiet: float
    place: str
    stacks: str


class Progress(TypedDict):
    """A committed optimizer step; throttled, except for the first one of an incarnation."""

    type: Literal["progress"]
    step: int


class Raised(TypedDict):
    """User code raised at ``place``, after ``step`` steps; the process is about to exit with ``code``."""

    type: Literal["exception"]
    exception: str
    message: str
    traceback: str
    place: str
    step: int
    code: int


class End(TypedDict):
    """The rank completed its ``call``-th Trainer call."""

    type: Literal["end"]
    call: int


class Bye(TypedDict):
    """The rank's script is over: whatever ends its process now, nothing is lost."""

    type: Literal["bye"]


class Log(TypedDict):
    """Where event logs go."""

    type: Literal["log"]
    directory: str


class Exclude(TypedDict):
    """Remove the live slots ``slots``, all at once."""

    type: Literal["exclude"]
    slots: list[int]
    reason: str


class Asked(TypedDict):
    """The rank received a signal by which the job is asked to stop."""

    type: Literal["asked"]
    signal: int


FromRank = (
    Hello
    | Options
    | Park
    | Begin
    | Join
    | Ready
    | Failed
    | Retire
    | AtTop
    | Waiting
    | Arrived
    | Answer
    | Progress
    | Raised
    | End
    | Bye
    | Log
    | Exclude
    | Asked
)

# Supervisor -> rank.


class Assign(TypedDict):
    """The answer to park: the spare is the rank in ``slot`` from now on. If the call is over, enter ("skip") comes first."""

    type: Literal["assign"]
    slot: int
    incarnation: int


class Enter(TypedDict):
    """The answer to begin: a generation follows ("start"), set up and send join ("join"), or pass over it ("skip").

    "again" is "start" in a call that was under way when the last of those died who held its state, after ``step`` steps. Who
    is to join learns which shard it will hold, and in how many ranks a replica lies.
    """

    type: Literal["enter"]
    call: int
    mode: Mode
    shard: int
    shard_size: int
    step: int


class Death(TypedDict):
    """A rank that is gone, and how it went: "SIGKILL", "exit code 1", "ValueError: ..."."""

    slot: int
    incarnation: int
    how: str


class Generation(TypedDict):
    """A version of the membership: global ranks are positions in ``members``.

    Members are listed replica by replica, within one in the order of shards. Orphans are alive, but their replica is not;
    it is for later generations to include them. In one that is ``ending`` the call is over for some: replicas lack those.
    """

    type: Literal["generation"]
    number: int
    members: list[int]
    replicas: list[list[int]]
    orphans: list[int]
    ending: bool
    incarnations: dict[int, int]
    reason: Reason
    dead: list[Death]
    hold: bool


class Go(TypedDict):
    """All members of ``generation`` are ready: connect now."""

    type: Literal["go"]
    generation: int


class JoinWanted(TypedDict):
    """Whether a joiner waits for the members to stop at a common step boundary."""

    type: Literal["join_wanted"]
    value: bool


class Query(TypedDict):
    """What does the training thread do? The others wait for it, or nobody has been heard of for long."""

    type: Literal["query"]


class Stop(TypedDict):
    """The job can't go on."""

    type: Literal["stop"]
    message: str


FromSupervisor = Assign | Enter | Generation | Go | JoinWanted | Query | Stop
