"""Why, when and what if."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Response

from concertina.core.errors import ConcertinaError
from concertina.questions import Band
from concertina.server.answers import ERRORS, json_response
from concertina.server.auth import Caller
from concertina.server.context import Context, Here, Who
from concertina.server.errors import ApiError
from concertina.server.models import JOB_ID, JobAsk, QuoteBody, WhyBody
from concertina.server.oracle import Offer, Why
from concertina.server.submit import fingerprint
from concertina.server.views import encode, finite

router = APIRouter(prefix="/api/v1", tags=["questions"], responses=ERRORS)
MOST_DELAYS = 50


@router.get("/jobs/{job_id}/why", response_model=WhyBody)
async def why(job_id: Annotated[str, Path(pattern=JOB_ID)], here: Here, who: Who) -> Response:
    """What holds a job back, and when it is expected to start and to end."""
    job = here.job(job_id, who)
    found = Why(sentence=job.state.reason or f"it is {job.state.phase.value}", eta=None)
    if not job.state.phase.is_end:
        try:
            found = await here.bench.ask(("why", job_id), lambda: here.parts.oracle.why(job_id))
        except ApiError:
            raise
        except ConcertinaError as error:  # nothing can be said yet: the last decision can
            found = Why(sentence=f"{found.sentence} ({error})", eta=None)
    eta = found.eta
    return json_response(
        encode(
            {
                "job": job_id,
                "phase": job.state.phase.value,
                "why": here.told(found.sentence, who),
                "reason": here.told(job.state.reason, who),
                "start": _band(eta.start if eta else None),
                "end": _band(eta.end if eta else None),
                "runs": eta.runs if eta else 0,
                "as_of_s": here.parts.clock(),
            }
        )
    )


@router.post("/quote", response_model=QuoteBody)
async def quote(ask: JobAsk, here: Here, who: Who) -> Response:
    """What would happen if this were submitted now. Nothing is promised."""
    request = await here.submitter.check(ask, who)
    try:
        offer = await here.bench.ask(("quote", fingerprint(request)), lambda: here.parts.oracle.quote(request))
    except ApiError:
        raise
    except ConcertinaError as error:
        raise ApiError(409, "no_quote", here.told(str(error), who), "") from None
    return json_response(encode(_offer(offer, here, who)))


def _offer(offer: Offer, here: Context, who: Caller) -> dict[str, Any]:
    found = offer.quote
    return {
        "taken": found.taken,
        "reason": here.told(found.reason, who),
        "earliest_s": finite(found.earliest_s),
        "start": _band(found.start),
        "end": _band(found.end),
        "delays": [
            {
                "job": delay.job_id if _mine(here, who, delay.job_id) else None,
                "by_s": finite(delay.by_s),
                "before_s": finite(delay.before_s),
                "after_s": finite(delay.after_s),
            }
            for delay in found.delays[:MOST_DELAYS]
        ],
        "runs": found.runs,
        "profiled": offer.profiled,
        "as_of_s": here.parts.clock(),
    }


def _mine(here: Context, who: Caller, job_id: str) -> bool:
    card = here.board.card(job_id)
    return card is not None and who.may_see(card.job.request.user)


def _band(band: Band | None) -> dict[str, float | None] | None:
    if band is None:
        return None
    return {"low_s": finite(band.low_s), "expected_s": finite(band.expected_s), "high_s": finite(band.high_s)}
