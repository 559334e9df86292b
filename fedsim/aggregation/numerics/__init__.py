"""Arithmetic on long rows: blocks of columns, order statistics, inner products of all pairs of rows."""
