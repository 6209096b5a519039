"""Remembers what rank 0 broadcast while a Trainer call started, for ranks that start later and alone."""

import pickle
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from lightning_ft.elastic.engine import Engine


class StartupRecord:
    """Answers a joiner's start-up broadcasts with the original results: log directory, checkpoint directory.

    Args:
        engine: Keeps the record.

    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._count = 0
        self.again = False
        """Whether the call was started before, by ranks that are gone; paths stay what they were."""
        self.open = True
        """Whether the call is still starting; afterwards broadcasts are not recorded."""

    def close(self) -> None:
        """The first batch begins."""
        self.open = False

    def recall(self, obj: Any, broadcast: Callable[[], Any]) -> Any:
        """Collective. Return what ``broadcast`` returns, or what it returned in the ranks that started together."""
        if not self.open:
            return broadcast()
        key = f"startup/{self._engine.call}/{self._count}"
        self._count += 1
        if self._engine.alone:
            value = self._engine.recorded(key)
            return obj if value is None else pickle.loads(value)
        if self.again and (value := self._engine.recorded(key)) is not None:
            known = pickle.loads(value)
            if isinstance(known, str | PurePath):
                return known
        result = broadcast()
        if self._engine.rank == 0:
            self._engine.record(key, pickle.dumps(result))
        return result
