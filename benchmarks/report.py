"""What the event log costs, and how long the report of a long run takes.

Writes the events of a run as its ranks would (``--events``, 1,000,000 by default, of ``--slots`` ranks, with deaths,
returns, checkpoints and metrics), and reports on it in a process of its own: ``report_seconds`` (bar: 20),
``report_megabytes`` (its peak memory; bar: 500), ``code`` (1: violations), ``bytes_per_step_and_rank`` (bar: 1024).
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class SyntheticRun:
    """The events of a run in which again and again a rank is killed in a step, which the others commit.

    It comes back 20 steps later. Nothing is wrong in it.

    Args:
        num_slots: How many ranks it has.
        seed: Of what is drawn.
        epoch_tickets: Batches of an epoch; 0: as many as 1000 steps take.
        period: Steps between two deaths; there is a checkpoint every two periods.

    """

    def __init__(self, num_slots: int = 4, *, seed: int = 0, epoch_tickets: int = 0, period: int = 500) -> None:
        self._period = period
        self._chance = random.Random(seed)
        self._now, self._count, self._step, self._number = 1_700_000_000.0, 0, 0, 1
        self._incarnations = dict.fromkeys(range(num_slots), 0)
        self._members = list(range(num_slots))
        self._epoch, self._size = -1, epoch_tickets or 1000 * num_slots
        self._open: list[int] = []
        self._away: tuple[int, int] | None = None  # who, and the step at which it comes back
        self._saved: list[str] = []

    def events(self, num_events: int) -> Iterator[Record]:
        """Yield about so many events, sorted by time."""
        members = self._members
        yield self._event("run", None, run_id="synthetic", num_slots=len(members), pid=1)
        for slot in members:
            yield self._event("spawn", slot, pid=10 + slot)
        yield from self._change("start")
        yield from self._checksums()
        while self._count < num_events - 40 * len(self._incarnations) or self._away is not None:
            yield from self._train_step()
        for slot in members:
            yield self._event("fit_end", slot, step=self._step, epoch=self._epoch, whole=not self._open)
        for slot in members:
            yield self._event("exit", slot, how="exit code 0", code=0, member=False, ago=0.0)
        yield self._event("finish", None, code=0, error=None)

    def _event(self, kind: str, slot: int | None, **fields: Any) -> Record:
        self._count, self._now = self._count + 1, self._now + 1e-5
        incarnation = 0 if slot is None else self._incarnations[slot]
        return {"t": self._now, "event": kind, "slot": slot, "incarnation": incarnation, **fields}

    def _change(self, reason: str, dead: Sequence[int] = (), joined: Sequence[int] = ()) -> Iterator[Record]:
        gone = [{"slot": slot, "incarnation": self._incarnations[slot], "how": "SIGKILL"} for slot in dead]
        common = {"members": list(self._members), "reason": reason}
        yield self._event("generation", None, number=self._number, dead=gone, hold=False, **common)
        told = {"dead": [[slot, "SIGKILL"] for slot in dead], "joined": list(joined), "stall_ms": 9.0}
        for slot in self._members:
            yield self._event("generation", slot, generation=self._number, **common, **told)
        self._number += 1

    def _checksums(self) -> Iterator[Record]:
        digest = f"{self._chance.getrandbits(64):016x}"
        for slot in self._members:
            yield self._event("checksum", slot, step=self._step, digest=digest)

    def _train_step(self) -> Iterator[Record]:
        members = self._members
        if not self._open:
            self._epoch, self._open = self._epoch + 1, list(range(self._size))[::-1]
            for slot in members:
                yield self._event("epoch", slot, epoch=self._epoch, num_tickets=self._size)
        self._now += 0.01
        self._step += 1
        step = self._step
        tickets = {str(slot): [self._open.pop()] for slot in members if self._open}
        is_fatal = step % self._period == self._period // 2 and len(members) > 1
        if is_fatal:
            yield from self._die(members[step // self._period % len(members)], tickets)
        content = {"epoch": self._epoch, "tickets": tickets, "members": list(members)}
        for slot in members:
            yield self._event("step", slot, step=step, **content)
        loss = 2.0 / (1 + step / 5000) + self._chance.gauss(0, 0.05)
        yield self._event("metrics", members[0], step=step, loss=loss, grad_norm=1.0 + abs(self._chance.gauss(0, 0.1)))
        if is_fatal:
            yield from self._checksums()
        if self._away is not None and step >= self._away[1]:
            yield from self._return(self._away[0])
        if step % (2 * self._period) == 0:
            yield from self._save(f"checkpoints/step={step}")

    def _die(self, victim: int, tickets: dict[str, list[int]]) -> Iterator[Record]:
        yield self._event("exit", victim, how="SIGKILL", code=-9, member=True, ago=0.0)
        self._members.remove(victim)
        yield from self._change("death", dead=[victim])
        self._open += tickets.pop(str(victim), [])
        self._incarnations[victim] += 1
        yield self._event("spawn", victim, pid=10 + victim + 100 * self._incarnations[victim])
        self._away = victim, self._step + 20

    def _return(self, slot: int) -> Iterator[Record]:
        others = list(self._members)
        self._members.append(slot)
        self._away = None
        yield from self._change("join", joined=[slot])
        for other in others:
            yield self._event("admitted", other, joined=[slot], ms=12.0)
        yield self._event("joined", slot, step=self._step, epoch=self._epoch)
        yield from self._checksums()

    def _save(self, path: str) -> Iterator[Record]:
        for slot in self._members:
            costs = {"ms": 200.0, "stall_ms": 2.0}
            yield self._event("checkpoint", slot, path=path, step=self._step, replaces=self._saved[-1:], **costs)
        self._saved.append(path)


def write(events: Iterator[Record], directory: Path) -> dict[str, int]:
    """Write events as ranks and supervisor do; return the bytes of steps, and how many steps and ranks that are."""
    files: dict[str, Any] = {}
    size = {"bytes": 0, "steps": 0}
    supervised = ("run", "spawn", "exit", "finish")
    for record in events:
        line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        slot = None if record["event"] in supervised else record["slot"]
        name = "supervisor.jsonl" if slot is None else f"slot_{slot}.incarnation_{record['incarnation']}.jsonl"
        if name not in files:
            files[name] = open(directory / name, "ab")  # noqa: SIM115
        files[name].write(line)
        if record["event"] in ("step", "metrics"):
            size["bytes"] += len(line)
            size["steps"] += record["event"] == "step"
    for file in files.values():
        file.close()
    return size


_REPORT = """
import resource, sys, time
from lightning_ft import cli
started = time.perf_counter()
try:
    cli.main(["report", sys.argv[1], "--html", sys.argv[2]])
except SystemExit as end:
    code = end.code
print(code or 0, time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, file=sys.stderr)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--keep", type=Path, default=None, help="Directory for the events and the report.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.keep or Path(temporary)
        run = directory / "ft_events" / "synthetic"
        run.mkdir(parents=True)
        size = write(SyntheticRun(options.slots).events(options.events), run)
        started = time.perf_counter()
        command = [sys.executable, "-c", _REPORT, str(run), str(directory / "report.html")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        total = time.perf_counter() - started
        print(done.stdout[-4000:])
        code, seconds, megabytes = done.stderr.split("\n")[-2].split()
        row = {"events": options.events, "report_seconds": round(float(seconds), 1), "with_imports": round(total, 1)}
        row |= {"report_megabytes": round(float(megabytes)), "code": int(code)}
        print(json.dumps(row | {"bytes_per_step_and_rank": round(size["bytes"] / size["steps"])}))


if __name__ == "__main__":
    main()
