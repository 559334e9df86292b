"""Races: processes that train on shared rows at the same time."""
