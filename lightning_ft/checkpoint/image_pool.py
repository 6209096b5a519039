"""Memory that saves use one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lightning_ft.checkpoint.image import Image
from lightning_ft.checkpoint.writer import Writer


class ImagePool:
    """Keeps images that no save uses for the next one that is laid out alike.

    Args:
        writer: Is told to let go of those that are not kept.

    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._free: list[tuple[Any, Image]] = []
        self._count = 0
        self._lock = threading.Lock()
        self._closed = False

    def take(self, key: Any, make: Callable[[str], Image]) -> Image:
        """Return an image that nobody uses, laid out as ``key`` says; ``make`` makes one of a name if there is none."""
        with self._lock:
            stale = [image for known, image in self._free if known != key]
            fitting = [image for known, image in self._free if known == key]
            self._free = [(key, image) for image in fitting[1:]]
            self._count += 1
        for image in stale:  # before another one is made: memory may be short
            self._writer.forget(image)
            image.close()
        return fitting[0] if fitting else make(f"image-{self._count}")

    def give_back(self, key: Any, image: Image) -> None:
        """Let the next save use it."""
        with self._lock:
            if not self._closed:
                self._free.append((key, image))
                return
        image.close()

    def close(self) -> None:
        """Let go of all memory. May be called twice."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for _, image in free:
            image.close()
