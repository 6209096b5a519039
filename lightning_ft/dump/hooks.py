"""Hooks on submodules, which see what goes in, what comes out, and the gradients of both."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_ft.dump._torch_compat import class_name, is_in_backward
from lightning_ft.dump.recorder import Pass, Recorder
from lightning_ft.dump.tensors import tensors_in


class ModuleHooks:
    """Hooks on all submodules of a module of which something is selected.

    They are no full backward hooks, which forbid that a module changes its input in place: a gradient is that of the tensor,
    from all who use it.

    Args:
        module: The module.
        recorder: Told of what they see.

    """

    def __init__(self, module: Module, recorder: Recorder) -> None:
        self._recorder = recorder
        self._handles: list[Any] = []
        for path, submodule in module.named_modules():
            if path:  # what goes into the module itself is the batch
                self._watch(path, submodule)

    def remove(self) -> None:
        """Take the hooks away. May be called twice."""
        while self._handles:
            self._handles.pop().remove()

    def _watch(self, path: str, module: Module) -> None:
        cls = class_name(module)
        inputs = [kind for kind in ("input", "grad_input") if self._recorder.selects(kind, path, cls)]
        outputs = [kind for kind in ("output", "grad_output") if self._recorder.selects(kind, path, cls)]
        if inputs:
            hook: Any = partial(self._before, path, inputs)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if outputs:
            self._handles.append(module.register_forward_hook(partial(self._after, path, outputs)))

    def _before(self, path: str, kinds: list[str], module: Module, args: Any, kwargs: Any) -> None:
        self._see(path, kinds, [*args, kwargs] if kwargs else list(args))

    def _after(self, path: str, kinds: list[str], module: Module, args: Any, output: Any) -> None:
        self._see(path, kinds, output)

    def _see(self, path: str, kinds: list[str], nest: Any) -> None:
        where = self._recorder.current
        if where is None:
            return
        again = is_in_backward()
        call = where.next_call(f"{'again ' if again else ''}{kinds[0]}", path)
        if isinstance(nest, list) and len(nest) == 1 and isinstance(nest[0], Tensor):
            nest = nest[0]  # most modules have one input, which needs no number
        for kind in kinds:
            if kind.startswith("grad_"):
                self._watch_gradients(kind, path, nest, call, where)
            elif not again:
                self._recorder.record(kind, path, nest, call, where)

    def _watch_gradients(self, kind: str, path: str, nest: Any, call: int, where: Pass) -> None:
        for index, tensor in tensors_in(nest):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._on_gradient, kind, f"{path}{index}", call, where))

    def _on_gradient(self, kind: str, path: str, call: int, where: Pass, gradient: Tensor) -> None:
        self._recorder.record(kind, path, gradient, call, where)
