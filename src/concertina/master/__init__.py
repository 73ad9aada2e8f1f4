"""The coordinator of one job."""
