"""Questions about a cluster, answered from a snapshot by running the simulator forward: why, eta, quote.

Pure: the snapshot is the one that `run_round` gets, from the live controller or from the simulator, `now`
stands in it, and chance comes from a seed. Nothing here starts, stops or promises anything.
"""

from concertina.questions.answers import Band, Delay, Eta, Quote
from concertina.questions.ask import eta, etas, quote
from concertina.questions.basis import Basis, QuestionError
from concertina.questions.why import why

__all__ = ["Band", "Basis", "Delay", "Eta", "QuestionError", "Quote", "eta", "etas", "quote", "why"]
