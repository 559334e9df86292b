"""Stacking: computing one module for many workers' parameters at once."""
