"""What Lightning's loops know, as plain data: where in an epoch they are, and what was logged in it."""
