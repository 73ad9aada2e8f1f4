"""How a request is refused: a status, a code for programs, a sentence and a hint for people."""

import json

from concertina.core.errors import ConcertinaError


class ApiError(ConcertinaError):
    """Becomes `{"error": {code, message, hint}}`."""

    def __init__(
        self, status: int, code: str, message: str, hint: str = "", headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.hint = status, code, message, hint
        self.headers = headers or {}

    def body(self) -> bytes:
        return json.dumps({"error": {"code": self.code, "message": self.message, "hint": self.hint}}).encode()


def no_job(job_id: str) -> ApiError:
    """The same for a job that is not there and for one that is somebody else's."""
    return ApiError(404, "no_such_job", f"there is no job {job_id!r}", "list yours with GET /api/v1/jobs")


def not_admin(what: str) -> ApiError:
    return ApiError(403, "admin_needed", f"only an admin may {what}", "ask whoever runs the cluster")


def no_controller() -> ApiError:
    return ApiError(
        503,
        "no_controller",
        "no controller is in office, so nothing was changed; one is needed to decide",
        "try again in a few seconds, or start one with `concertina up`",
    )
