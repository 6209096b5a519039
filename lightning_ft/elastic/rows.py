"""Collectives in which a rank has a row for every rank: rows go by slot, since ranks move up when one of them dies."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ft.elastic.engine import Engine
from lightning_ft.elastic.exchange import Exchange


class RowCollectives:
    """Collectives with one row for every live rank; rows for the dead are left out.

    The result of an operation is the same on all ranks, with the slots that it is for: a rank in which it failed may receive
    it from another.

    Args:
        engine: Runs them.

    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def scatter(self, like: Tensor, rows: Sequence[Tensor] | None, src: int) -> Tensor:
        """Collective. Return this rank's row of those that rank ``src`` has.

        Raises:
            RuntimeError: If that rank died in it.

        """
        if self._engine.alone:
            return like if rows is None else rows[min(self._engine.rank, len(rows) - 1)]
        recipients = self._recipients(rows, "scatter")

        def body(exchange: Exchange) -> tuple[list[int], Tensor | None]:
            slots = self._slots()
            if src >= exchange.size or not exchange.inline[src][0]:
                return slots, None
            if exchange.rank == src:
                assert rows is not None
                stacked = torch.stack([rows[recipients.index(slot)].detach() for slot in slots])
            else:
                stacked = torch.empty(exchange.size, *like.shape, dtype=like.dtype, device=like.device)
            exchange.broadcast(stacked, src)
            return slots, stacked

        label, inline = f"scatter from {src}: {like.numel()} elements"[:44], bytes([rows is not None])
        slots, scattered = self._engine.run(label, body, inline=inline)
        if scattered is None:
            raise RuntimeError(
                f"`torch.distributed.scatter(src={src})`: the rank that had the tensors died. Let every rank compute"
                " them, or broadcast what they are made of."
            )
        row: Tensor = scattered[slots.index(self._engine.slot)]
        return row

    def reduce_scatter(self, rows: Sequence[Tensor], op: Any) -> Tensor:
        """Collective. Return the reduction of all ranks' rows for this rank."""
        recipients = self._recipients(rows, "reduce_scatter")

        def body(exchange: Exchange) -> tuple[list[int], Tensor]:
            slots = self._slots()
            stacked = torch.stack([rows[recipients.index(slot)].detach() for slot in slots])
            exchange.all_reduce(stacked, op)
            return slots, stacked

        # The sizes of the rows and not of all of them: a rank may have heard of a death that another did not hear of.
        slots, reduced = self._engine.run(f"reduce_scatter: {rows[0].numel()} elements"[:44], body)
        row: Tensor = reduced[slots.index(self._engine.slot)]
        return row

    def all_to_all(self, rows: Sequence[Tensor]) -> list[Tensor | None]:
        """Collective. Return what every rank has for this rank, by rank at the call, flat; None from those that died in it.

        Sizes may differ.
        """
        recipients = self._recipients(rows, "all_to_all")

        def body(exchange: Exchange) -> tuple[list[int], list[list[int]], list[Tensor]]:
            slots = self._slots()
            chosen = [rows[recipients.index(slot)].detach().reshape(-1) for slot in slots]
            sizes = [table.tolist() for table in exchange.all_gather(torch.tensor([row.numel() for row in chosen]))]
            padded = chosen[0].new_zeros(max(1, *map(sum, sizes)))
            flat = torch.cat(chosen)
            padded[: flat.numel()] = flat
            return slots, sizes, exchange.all_gather(padded)

        label = f"all_to_all: {rows[0].dtype}"[:44]
        slots, sizes, gathered = self._engine.run(label, body)
        mine = slots.index(self._engine.slot)
        received = [flat[: sum(of)].split(of)[mine] for flat, of in zip(gathered, sizes, strict=True)]
        if self._engine.alone:
            return [received[0]] * len(rows)
        by_slot = dict(zip(slots, received, strict=True))
        return [by_slot.get(slot) for slot in recipients]

    def _slots(self) -> list[int]:
        return [self._engine.slot] if self._engine.alone else list(self._engine.members)

    def _recipients(self, rows: Sequence[Tensor] | None, name: str) -> list[int]:
        """Return the slots that the rows are for."""
        if rows is None:
            return []
        if self._engine.alone:  # in a start-up of its own: as if all ranks were like this one
            return [-1] * min(self._engine.rank, len(rows) - 1) + [self._engine.slot]
        members = list(self._engine.members)
        if len(rows) != len(members):
            raise ValueError(
                f"`torch.distributed.{name}` of {len(rows)} tensors, but {len(members)} ranks are alive: expected one for"
                " each. Ask for `torch.distributed.get_world_size()` right before, since ranks die and come back."
            )
        return members
