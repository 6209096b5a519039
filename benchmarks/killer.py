"""Harms ranks of a running job from outside, at moments that nothing in the job knows of."""

import json
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

from lightning_ft.events.log import read_events


class Killer:
    """Watches a job through its event log and kills its ranks.

    What it kills it records beside the ranks' own events, so that a death's time is that of the signal.

    Args:
        root: The job's ``default_root_dir``; what earlier jobs wrote there is left alone.

    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._earlier = self._logs()
        self.num_faults = 0

    def _logs(self) -> set[Path]:
        return set(self._root.glob("**/ft_events/*/supervisor.jsonl"))

    @property
    def directory(self) -> Path | None:
        """Where the job writes its events, once it does."""
        found = self._logs() - self._earlier
        return found.pop().parent if found else None

    @property
    def has_stepped(self) -> bool:
        """Whether the job committed a step."""
        return self.directory is not None and any(event["event"] == "step" for event in read_events(self.directory))

    def replicas(self) -> list[list[int]]:
        """Return the slots of the replicas that are whole."""
        assert self.directory is not None
        generations = [e for e in read_events(self.directory) if e["event"] == "generation" and e["slot"] is None]
        replicas: list[list[int]] = generations[-1]["replicas"]
        return replicas

    def settled(self) -> dict[int, int]:
        """Return the process ids, by slot, of the ranks that take part in the training and hold its state."""
        if self.directory is None:
            return {}
        pids: dict[tuple[int, int], int] = {}
        entered: set[tuple[int, int]] = set()
        generation: dict[str, Any] = {"members": [], "incarnations": {}}
        for event in read_events(self.directory):
            process = (event["slot"], event["incarnation"])
            match event["event"]:
                case "spawn":
                    pids[process] = event["pid"]
                case "joined":
                    entered.add(process)
                case "generation" if event["slot"] is None:
                    generation = event
                case "exit":
                    pids.pop(process, None)
        members = {slot: generation["incarnations"][str(slot)] for slot in generation["members"]}
        return {
            slot: pids[slot, incarnation]
            for slot, incarnation in members.items()
            if (slot, incarnation) in pids and (incarnation == 0 or (slot, incarnation) in entered)
        }

    def incarnation(self, slot: int) -> int:
        """Return how often ``slot`` was started before its newest process."""
        assert self.directory is not None
        spawns = [e for e in read_events(self.directory) if e["event"] == "spawn" and e["slot"] == slot]
        return int(spawns[-1]["incarnation"])

    def kill(self, slot: int, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process that is in ``slot``."""
        assert self.directory is not None
        incarnation, moment = self.incarnation(slot), time.time()
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        self.num_faults += 1
        kind = signal.Signals(number).name
        line = {"t": moment, "event": "fault", "slot": slot, "incarnation": incarnation, "kind": kind}
        with open(self.directory / "killer.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def have_raise(self, slot: int) -> None:
        """Have the next step of ``slot`` raise, see ``benchmarks.workload``."""
        (self._root / f"raise_{slot}").touch()
        self.num_faults += 1

    def fill_disk(self, pid: int, full: bool = True) -> None:
        """Have each write of a process to a file fail, or no longer: as on a full disk, but for this process alone."""
        unlimited = resource.RLIM_INFINITY
        try:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 if full else unlimited, unlimited))
        except ProcessLookupError:
            return
        self.num_faults += full
