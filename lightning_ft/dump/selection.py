"""Which tensors are dumped, by their names."""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch.nn import Module

from lightning_ft.dump._torch_compat import class_name

KINDS = (
    "batch",
    "value",
    "input",
    "output",
    "grad_output",
    "grad_input",
    "loss",
    "prediction",
    "parameter",
    "buffer",
    "parameter_grad",
    "optimizer",
)

_OF_SUBMODULES = ("input", "output", "grad_input", "grad_output")
_OF_PARAMETERS = ("parameter", "parameter_grad")
_WILD = re.compile(r"[*?\[]")


def check_patterns(patterns: Sequence[str]) -> None:
    """Raise ValueError if one of ``patterns`` can match no name, or none of them selects anything."""
    kinds = ", ".join(KINDS)
    for pattern in patterns:
        literal = _WILD.split(pattern.removeprefix("!"), maxsplit=1)[0]
        kind, colon, _ = literal.partition(":")
        can_match = kind in KINDS if colon else any(known.startswith(literal) for known in KINDS) and _WILD.search(pattern)
        if not can_match or ("*" not in pattern and ":" not in pattern):
            hint = f" Did you mean '{kind}:*'?" if kind in KINDS else ""
            raise ValueError(
                f"`TensorDump(filter=[{pattern!r}])` is not valid: expected KIND:PATH.{hint} Kinds are {kinds}."
            )
    if all(pattern.startswith("!") for pattern in patterns):
        raise ValueError(
            f"`TensorDump(filter={list(patterns)!r})` is not valid: expected a pattern of what is dumped, such as '*'. For"
            " nothing at all set `enable` to False."
        )


def without_match(patterns: Sequence[str], module: Module) -> list[str]:
    """Return those of ``patterns`` that ask for submodules, parameters or buffers of which ``module`` has none."""
    names = list(_names_of(module))
    return [
        pattern
        for pattern in patterns
        if _asks_for_one(pattern) and not any(Selection([pattern.lstrip("!")])(*n) for n in names)
    ]


def _asks_for_one(pattern: str) -> bool:
    kind, _, path = pattern.lstrip("!").partition(":")
    return "@" in pattern or (kind in (*_OF_SUBMODULES, *_OF_PARAMETERS, "buffer") and path != "*")


def _names_of(module: Module) -> Iterator[tuple[str, str, str]]:
    for path, submodule in module.named_modules():
        yield from ((kind, path, class_name(submodule)) for kind in _OF_SUBMODULES if path)
    for path, _ in module.named_parameters():
        yield from ((kind, path, "") for kind in _OF_PARAMETERS)
    for path, _ in module.named_buffers():
        yield "buffer", path, ""


class Selection:
    """Patterns of names ``KIND:PATH``, such as ``output:encoder.*`` or ``parameter:*.bias``.

    A name is selected if a pattern matches it and none that begins with ``!`` does. ``*`` matches dots, too. A pattern
    with ``@`` also asks for the class of a submodule: ``output:*@Linear``. Values of ``dump(NAME, ...)`` are ``value:NAME``.

    Args:
        patterns: The patterns.

    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
        self._unwanted = [pattern[1:] for pattern in patterns if pattern.startswith("!")]

    def __call__(self, kind: str, path: str, cls: str = "") -> bool:
        """Return whether what is named so, of a submodule of class ``cls``, is selected."""
        name = f"{kind}:{path}"

        def matches(pattern: str) -> bool:
            return fnmatchcase(f"{name}@{cls}" if "@" in pattern else name, pattern)

        return any(map(matches, self._wanted)) and not any(map(matches, self._unwanted))
