"""What a rank's training thread does, noted where it costs nothing and told only when the supervisor asks."""

import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from lightning_ft.elastic.protocol import Answer, Doing

_STEPPING = ("loader", "training step")
_NOT_TELLING = (str(Path(__file__).parent.parent), sysconfig.get_paths()["stdlib"], "<frozen")


class Activity:
    """What the thread that made this does; read by the thread that answers the supervisor."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.begin_call()

    def begin_call(self) -> None:
        """A Trainer call begins; until its first step, whatever happens is set-up: graphs are compiled in that step."""
        self._is_warm = False
        self.enter("set-up")

    def enter(self, doing: Doing) -> None:
        """Say what comes next; also a sign that this rank moves, if it is the same as before."""
        self._doing, self._since = doing, time.monotonic()

    @contextmanager
    def during(self, doing: Doing) -> Iterator[None]:
        """Do something in between."""
        before = self._doing
        self.enter(doing)
        try:
            yield
        finally:
            self.enter(before)

    def stepped(self) -> None:
        """An optimizer step is complete."""
        self._is_warm = True
        self.enter("callbacks")

    def answer(self) -> Answer:
        """Return what the supervisor wants to know."""
        doing: Doing = self._doing if self._is_warm or self._doing not in _STEPPING else "set-up"
        frames = sys._current_frames()
        return {
            "type": "answer",
            "doing": doing,
            "quiet": time.monotonic() - self._since,
            "place": _place(frames.get(self._thread)),
            "stacks": self._describe(frames),
        }

    def _describe(self, frames: dict[int, FrameType]) -> str:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        threads = sorted(frames.items(), key=lambda item: item[0] != self._thread)
        here = threading.get_ident()
        return "\n".join(f"Thread {names.get(ident, ident)}:\n{_stack(f)}" for ident, f in threads if ident != here)


def _stack(frame: FrameType) -> str:
    """Without source lines: the storage that holds them may be what this rank waits for."""
    found = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(frame)]
    return "\n".join(f'  File "{path}", line {line}, in {name}' for path, line, name in reversed(found))


def _place(frame: FrameType | None) -> str:
    """Return the innermost place outside of this package and the standard library."""
    for inner, line in traceback.walk_stack(frame) if frame is not None else ():
        path = inner.f_code.co_filename
        if "site-packages" in path or not path.startswith(_NOT_TELLING):
            return f"{Path(path).name}:{line} in {inner.f_code.co_name}"
    return ""
