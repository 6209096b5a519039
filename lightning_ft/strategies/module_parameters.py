"""The parameters of a module, without walking through all its submodules at each backward pass."""

from collections.abc import Iterator

from torch.nn import Module, Parameter
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class ModuleParameters:
    """Iterates over a module's parameters; looks for them anew once any module got a new parameter or submodule.

    Args:
        module: The module.

    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: list[Parameter] | None = None
        self._handles = [
            register_module_parameter_registration_hook(self._forget),
            register_module_module_registration_hook(self._forget),
        ]

    def __iter__(self) -> Iterator[Parameter]:
        if self._known is None:
            self._known = list(self._module.parameters())
        return iter(self._known)

    def close(self) -> None:
        """Stop listening. May be called twice."""
        for handle in self._handles:
            handle.remove()

    def _forget(self, *args: object) -> None:
        self._known = None
