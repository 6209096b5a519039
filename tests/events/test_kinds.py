import ast
from pathlib import Path
from typing import Any

import pytest

import lightning_ft
from lightning_ft.events.kinds import KINDS, STAMP, as_words, mismatch

EMIT = {"emit": "events", "record": "roster"}  # method -> what the thing is named that has it


def emitted() -> list[tuple[str, str, set[str], bool]]:
    """Each place in the package that emits an event: where, which, with which fields, and whether there may be more."""
    found = []
    for path in sorted(Path(lightning_ft.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in EMIT):
                continue
            if EMIT[node.func.attr] not in ast.unparse(node.func.value) or not node.args:
                continue
            if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                names = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                is_open = any(keyword.arg is None for keyword in node.keywords)
                found.append((f"{path.name}:{node.lineno}", node.args[0].value, names, is_open))
    return found


def test_all_parts_emit_events_of_known_kinds_with_the_fields_of_their_kind() -> None:
    places = emitted()
    assert {"step", "generation", "exit", "checkpoint", "resumed", "epoch", "checksum"} <= {kind for _, kind, _, _ in places}
    for where, name, fields, is_open in places:
        assert name in KINDS, f"{where} emits {name!r}, which `events/kinds.py` does not know"
        kind = KINDS[name]
        unknown = fields - kind.fields.keys() - kind.optional.keys() - STAMP.keys()
        assert kind.open or not unknown, f"{where}: {name} with {unknown}"
        assert is_open or kind.fields.keys() <= fields, f"{where}: {name} without {kind.fields.keys() - fields}"


STAMPED: dict[str, Any] = {"t": 1.0, "slot": 0, "incarnation": 0}


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        ({**STAMPED, "event": "step", "step": 3, "tickets": {"0": [1]}}, None),
        ({**STAMPED, "event": "mine", "anything": "goes"}, None),
        ({**STAMPED, "event": "metrics", "step": 3, "loss": 0.5}, None),
        ({**STAMPED, "event": "step"}, "has no `step`"),
        ({**STAMPED, "event": "step", "step": "3"}, "has step='3'"),
        ({**STAMPED, "event": "step", "step": 3, "members": 2}, "has members=2"),
        ({"t": 1.0, "event": "step", "slot": 0, "step": 3}, "has no `incarnation`"),
        ({**STAMPED, "event": "step", "slot": "0", "step": 3}, "has slot='0'"),
    ],
)
def test_an_event_that_lacks_a_field_or_has_another_type_in_it_is_told(record: dict[str, Any], wrong: str | None) -> None:
    assert mismatch(record) == wrong


def test_an_event_as_words_can_be_found_with_grep() -> None:
    record = {"event": "exit", "slot": 1, "how": 'raised "no"\n', "member": True, "ago": None, "members": [0, 2], "path": ""}
    assert as_words(record) == 'event=exit slot=1 how="raised \\"no\\"\\n" member=true ago=- members=0,2 path=""'
