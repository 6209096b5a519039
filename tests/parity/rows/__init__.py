"""The parity table: one list of rows, by theme."""

from rows import control, hooks, logged, optimization

TABLE = [row for theme in (optimization, logged, control, hooks) for row in theme.ROWS]
