"""Which rank evaluates which batches, so that all are evaluated by a rank that lives to the end of it; pure."""

from collections.abc import Collection, Mapping

Batch = tuple[int, int]
"""The slot whose share it belongs to, and its number in that."""


class EvaluationShares:
    """Knows in whose metrics each batch is.

    What a rank evaluated is lost with it. So all batches that a dead rank held are dealt to the live ones, be they of its
    own share or others that it had taken over.

    Args:
        num_batches: Of the share of each slot.

    """

    def __init__(self, num_batches: Mapping[int, int]) -> None:
        self._held = {slot: [(slot, index) for index in range(count)] for slot, count in num_batches.items()}

    def hand_over(self, live: Collection[int]) -> list[dict[int, Batch | None]]:
        """Deal what slots that are not ``live`` hold.

        Returns:
            By turns, the batch of each live slot; None for one that has none in the last turn.

        """
        slots = sorted(live)
        orphaned = [batch for slot in sorted(self._held.keys() - set(slots)) for batch in self._held.pop(slot)]
        for slot, batch in zip(slots * len(orphaned), orphaned, strict=False):
            self._held[slot].append(batch)
        turns = [orphaned[first : first + len(slots)] for first in range(0, len(orphaned), len(slots))]
        return [{slot: turn[n] if n < len(turn) else None for n, slot in enumerate(slots)} for turn in turns]
