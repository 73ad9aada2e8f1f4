"""The simulator: another backend for the same policies, made of numbers instead of processes.

`simulate` in `concertina.simulator.run` is the way in.
"""
