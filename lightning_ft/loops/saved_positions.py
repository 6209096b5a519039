"""Under which names the fit loop keeps the positions of training loaders in a checkpoint."""

from typing import Any

LIGHTNINGS = "combined_loader"
"""Lightning's own name. It refuses a checkpoint that has more or fewer of them than there are loaders with a position."""
OURS = "elastic_loaders"
"""Where the strategy deals the data: no other strategy looks there, and so each can resume from its checkpoints."""


def drop_positions(loops: dict[str, Any]) -> None:
    """Take the positions out of what the fit loop saved: whoever does that knows them."""
    loops["state_dict"].pop(LIGHTNINGS, None)
    loops["state_dict"][OURS] = []
