"""The interface's questions about the future, answered from the mirror (`cluster/now.py`)."""

import time

from concertina.cluster.mirror import Mirror
from concertina.cluster.now import quote_now, why_now
from concertina.cluster.records import JobRequest
from concertina.cluster.script_file import read_script
from concertina.core.errors import UsageError
from concertina.server.oracle import Offer, Why


class LookAhead:
    """An `Oracle` for `concertina up`."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    def why(self, job_id: str) -> Why:
        sentence, eta = why_now(self._mirror, job_id, time.time())
        return Why(sentence=sentence, eta=eta)

    def quote(self, request: JobRequest) -> Offer:
        try:
            script = read_script(request.script)
        except OSError as error:
            raise UsageError(f"{request.script} can not be read here: {error.strerror}") from None
        found, measured = quote_now(self._mirror, request, script, time.time())
        return Offer(quote=found, profiled=measured)
