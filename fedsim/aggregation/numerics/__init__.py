"""Arithmetic on matrices [n, d] with long rows: blocks of columns, order statistics, inner products of all rows."""
