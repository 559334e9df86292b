"""How the rows of a cohort are trained: one after another, or stacked."""
