"""Whether a step is right: what its values should be, and what running it again says. No Lightning in here."""
