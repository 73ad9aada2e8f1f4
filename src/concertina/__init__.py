"""Elastic deep-learning training that plays the same tune at any size."""

__version__ = "0.1.0"
