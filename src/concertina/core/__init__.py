"""The vocabulary that all parts share: plain data and its validation, no behaviour, standard library only."""
