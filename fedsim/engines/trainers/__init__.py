"""Trainers of a cohort's workers: one after another, or several together in a stack."""
