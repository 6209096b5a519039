"""Callbacks for ``Trainer(callbacks=[...])``."""
