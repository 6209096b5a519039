"""``dump("name", tensor)``: values that a module's own code asks to be dumped."""

from typing import Any

from lightning_ft.dump.recorder import Recorder

_active: list[Recorder] = []


def dump(name: str, value: Any) -> None:
    """Dump ``value``, which may be nested, as ``value:NAME``; does nothing unless a `TensorDump` is at work in this process.

    Example::

        def training_step(self, batch, batch_idx):
            logits = self.net(batch)
            dump("logits", logits)

    """
    for recorder in _active:
        recorder.record_value(name, value)


def activate(recorder: Recorder) -> None:
    """Let ``recorder`` have what is dumped from now on."""
    _active.append(recorder)


def deactivate(recorder: Recorder) -> None:
    """Let ``recorder`` have nothing more. May be called twice."""
    if recorder in _active:
        _active.remove(recorder)
