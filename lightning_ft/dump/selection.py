"""Which tensors are dumped, by their names."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

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
