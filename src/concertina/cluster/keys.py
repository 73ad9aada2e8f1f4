"""Names in the store, and who writes each. One writer per key: nobody has to ask who won.

| key | writer |
|---|---|
| `requests/JOB` | the interface, once: what a user asked for |
| `states/JOB` | the controller in office (fenced): what was decided |
| `seen/JOB` | the job's keeper: what it sees |
| `keepers/JOB` | the keeper in office, with its lease: gone when it is |
| `nodes/NODE` | the controller |
| `asks/ID` | the interface, once: something to do; removed by the controller when it is done |
| `answers/ID` | the controller, with a lease: what came of it |
| `curves/KEY` | the controller: how fast a kind of job is |
| `users/NAME` | the interface: a user's token (hashed) and limits |
| `submissions/HASH` | the interface, once: which job an idempotency key stands for |
| `spent/USER` | the controller: what a user's forgotten jobs have received |
| `cluster` | the controller: policy, slots lent back |
"""

import hashlib

REQUESTS = "requests/"
STATES = "states/"
SEEN = "seen/"
KEEPERS = "keepers/"
NODES = "nodes/"
ASKS = "asks/"
ANSWERS = "answers/"
CURVES = "curves/"
USERS = "users/"
SUBMISSIONS = "submissions/"
SPENT = "spent/"
CLUSTER = "cluster"
CONTROLLER = "controller"  # the name of the office that controllers stand for


def submission_key(user: str, idempotency: str) -> str:
    """Where it is noted which job a user's idempotency key stands for."""
    return SUBMISSIONS + hashlib.sha256(f"{user}\0{idempotency}".encode()).hexdigest()


def job_of(key: str) -> str:
    """The last part: `states/digits-1` is about `digits-1`."""
    return key.partition("/")[2]
