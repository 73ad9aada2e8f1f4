"""The live cluster: jobs taken, placed, resized and finished on real devices.

Everything that must survive a restart lies in the store, and every key has one writer (`keys.py`, `records.py`):
the interface writes what users ask, the controller what was decided, a job's keeper what it sees. Each reads the
others' words and acts on its own; nobody calls anybody.
"""
