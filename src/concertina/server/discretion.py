"""What those are told who may not know of everybody's jobs. Pure.

The controller's sentences name the jobs that are in the way, and a job's id is made of its name. Its owner and admins
read them as they are; for anybody else it is somebody else's job.
"""

import re
from collections.abc import Mapping
from typing import Any

from concertina.cluster.records import JobRequest
from concertina.server.auth import Caller

SOMEBODYS = "somebody else's job"
FORGOTTEN = "a forgotten job"  # whose it was, nobody can tell any more
_WORD = re.compile(r"[a-z0-9][a-z0-9-]*")  # as job ids are
# As `submit.make_request` makes them; what is part of a path is no job's, but of an error that a script ended with.
_ID = re.compile(r"(?<![\w./-])[a-z0-9][a-z0-9-]*-(?=[a-z]*[2-7])[a-z2-7]{8}(?![\w/-]|\.\w)")


def discreet(sentence: str, caller: Caller, requests: Mapping[str, JobRequest]) -> str:
    """Without the ids of jobs that this caller may not see. `requests`: of all jobs there are."""
    if caller.admin:
        return sentence

    def known(found: re.Match[str]) -> str:
        request = requests.get(found[0])
        return found[0] if request is None or caller.may_see(request.user) else SOMEBODYS

    def remembered(found: re.Match[str]) -> str:
        return found[0] if found[0] in requests else FORGOTTEN

    return _ID.sub(remembered, _WORD.sub(known, sentence))


def discreet_job(plain: dict[str, Any], caller: Caller, requests: Mapping[str, JobRequest]) -> dict[str, Any]:
    """The same for a whole job."""
    if caller.admin:
        return plain
    history = [{**line, "reason": discreet(line["reason"], caller, requests)} for line in plain["history"]]
    return {**plain, "reason": discreet(plain["reason"], caller, requests), "history": history}
