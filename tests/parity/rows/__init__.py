"""The parity table: one list of rows, by theme."""

from rows import calls, control, data, hooks, logged, modules, optimization, saving

TABLE = [row for theme in (optimization, modules, logged, control, hooks, data, calls, saving) for row in theme.ROWS]
