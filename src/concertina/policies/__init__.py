"""Decisions shared by the live scheduler and the simulator. Pure: values in, values out."""
