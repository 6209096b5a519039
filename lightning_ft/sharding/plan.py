"""Which modules of a plain module are sharded together: a pure function of the module's structure."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch.nn import Module, Parameter

from lightning_ft.sharding.options import ShardingOptions

_LARGE_LAYER = 1 << 20
"""Elements above which a single layer is worth a gather of its own."""


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered together, and let go together.

    Args:
        name: Of the module; empty for the root.
        module: The module.
        parameters: Its parameters by name, without those of units inside.

    """

    name: str
    module: Module
    parameters: dict[str, Parameter]

    @property
    def num_elements(self) -> int:
        """Number of elements of its parameters."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters when they are gathered."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters.values())


def plan_units(module: Module, options: ShardingOptions, *, by_hand: bool = False) -> tuple[Unit, ...]:
    """Return the units of ``module``, inner ones before outer ones, the root last.

    Args:
        module: A module whose parameters are plain.
        options: What the user chose.
        by_hand: Whether the module steps its optimizers by hand. Then no parameter may belong to the root, which is
            gathered until the training step is over: each submodule becomes a unit. So it does if units cast their
            inputs: those of the root are the whole batch, with the targets in it.

    """
    if (by_hand or options.casts) and options.units is None:
        chosen = dict(_callable_parts(module))
    elif options.units is None:
        chosen = dict(_repeated_blocks(module, ""))
    else:
        chosen = {name: part for name, part in module.named_modules() if name and _is_chosen(name, part, options)}
    chosen = {name: part for name, part in chosen.items() if _can_be_unit(part, module)}
    units: list[Unit] = []
    taken: set[Parameter] = set()
    for name in sorted(chosen, key=lambda name: -name.count(".")):
        units.append(_unit(name, chosen[name], taken))
    order = {name: position for position, (name, _) in enumerate(module.named_modules())}
    units.sort(key=lambda unit: (-unit.name.count("."), order[unit.name]))
    return (*units, _unit("", module, taken))


def _unit(name: str, module: Module, taken: set[Parameter]) -> Unit:
    prefix = f"{name}." if name else ""
    own = {prefix + key: p for key, p in module.named_parameters() if p not in taken}
    taken.update(own.values())
    return Unit(name, module, own)


def _repeated_blocks(module: Module, prefix: str) -> Iterator[tuple[str, Module]]:
    """Yield the outermost modules of which their parent has several of one class."""
    counts: dict[type[Module], int] = defaultdict(int)
    for child in module.children():
        counts[type(child)] += 1
    for name, child in module.named_children():
        if counts[type(child)] > 1 and _is_block(child):
            yield prefix + name, child
        else:
            yield from _repeated_blocks(child, f"{prefix}{name}.")


def _is_block(module: Module) -> bool:
    if not _can_be_called(module):
        return False
    is_layer = all(next(child.parameters(), None) is None for child in module.children())
    return not is_layer or sum(p.numel() for p in module.parameters()) >= _LARGE_LAYER


def _callable_parts(module: Module, prefix: str = "") -> Iterator[tuple[str, Module]]:
    """Yield the outermost submodules that have a forward, and the repeated blocks in them."""
    for name, child in module.named_children():
        if _can_be_called(child):
            yield prefix + name, child
            yield from _repeated_blocks(child, f"{prefix}{name}.")
        else:
            yield from _callable_parts(child, f"{prefix}{name}.")


def _can_be_called(module: Module) -> bool:
    return type(module).forward is not Module.forward


def _is_chosen(name: str, module: Module, options: ShardingOptions) -> bool:
    if callable(options.units):
        return options.units(name, module)
    assert options.units is not None
    names = {ancestor.__name__ for ancestor in type(module).__mro__}
    return any(unit in names if isinstance(unit, str) else isinstance(module, unit) for unit in options.units)


def _can_be_unit(module: Module, root: Module) -> bool:
    """Whether it has parameters and shares none with modules outside: what is tied is gathered together, by the root."""
    own = set(module.parameters())
    return bool(own) and _can_be_called(module) and own.isdisjoint(_parameters_outside(root, module))


def _parameters_outside(root: Module, module: Module) -> Iterator[Parameter]:
    if root is not module:
        yield from (parameter for parameter in root._parameters.values() if parameter is not None)
        for child in root.children():
            yield from _parameters_outside(child, module)
