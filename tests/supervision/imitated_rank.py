"""The rank's side of the control channel in a few lines, for scripts that a real supervisor starts."""

import os
import sys
from typing import Any

from lightning_ft.elastic.channel import connect
from lightning_ft.elastic.options import Policy
from lightning_ft.elastic.protocol import RankEnvironment


class ImitatedRank:
    def __init__(self, **policy: Any) -> None:
        environment = RankEnvironment.from_environ(os.environ)
        assert environment is not None
        self.slot = environment.slot
        self.incarnation = environment.incarnation
        self.generation: Any = None
        self.mode = ""
        self._channel = connect(environment.supervisor)
        self._inbox: list[Any] = []
        self.send("hello", slot=self.slot, incarnation=self.incarnation, pid=os.getpid())
        self._channel.send(Policy(**policy).to_message())

    def send(self, kind: str, /, **fields: Any) -> None:
        self._channel.send({"type": kind, **fields})

    def begin(self, call: int = 0, fn: str = "fit") -> str:
        """Return the mode in which this rank entered the call; a spare first waits for a slot."""
        if self.slot < 0:
            self.send("park", call=call)
            if (message := self._receive())["type"] == "enter":
                return str(message["mode"])
            self.slot, self.incarnation = message["slot"], message["incarnation"]
        self.send("begin", call=call, fn=fn)
        while (message := self._receive())["type"] != "enter":
            pass
        self.mode = str(message["mode"])
        if self.mode == "join":
            self.send("join", call=call)
        return self.mode

    def next_generation(self) -> list[int]:
        """Go through generations until one goes; return its members."""
        while True:
            message = self._receive()
            if message["type"] == "generation":
                self.generation = message
                self.send("ready", generation=message["number"])
            elif message["type"] == "join_wanted" and message["value"]:
                self.send("at_top", generation=self.generation["number"])
            elif message["type"] == "stop":
                sys.exit(1)
            elif message["type"] == "go" and message["generation"] == self.generation["number"]:
                return list(self.generation["members"])

    def raise_error(self, error: BaseException, code: int = 1) -> None:
        """Do what a rank does about an exception of the user's."""
        name = type(error).__name__
        trace = f"Traceback of {name}: {error}"
        self.send("exception", exception=name, message=str(error), traceback=trace, place="train.py:1", step=0, code=code)
        sys.exit(code)

    def _receive(self) -> Any:
        if not self._inbox:
            self._inbox += self._channel.receive()
            if not self._inbox:
                sys.exit("the supervisor is gone")
        return self._inbox.pop(0)
