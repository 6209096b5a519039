"""Kills ranks of a running job from outside, at moments that nothing in the job knows of."""

import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_ft.events.log import read_events


class Killer:
    """Watches a job through its event log and kills its ranks.

    What it kills it records beside the ranks' own events, so that a death's time is that of the signal.

    Args:
        root: The job's ``default_root_dir``; it has run nothing else there.

    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.num_killed = 0

    @property
    def directory(self) -> Path | None:
        """Where the job writes its events, once it does."""
        found = list(self._root.glob("**/ft_events/*/supervisor.jsonl"))
        return found[0].parent if found else None

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

    def kill(self, victims: Iterable[tuple[int, int]]) -> None:
        """Send SIGKILL to ``(slot, process id)`` each, one right after the other."""
        assert self.directory is not None
        records = [(slot, pid, self.incarnation(slot)) for slot, pid in victims]
        lines = []
        for slot, pid, incarnation in records:
            moment = time.time()
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.num_killed += 1
            lines.append({"t": moment, "event": "fault", "slot": slot, "incarnation": incarnation, "kind": "kill"})
        with open(self.directory / "killer.jsonl", "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
