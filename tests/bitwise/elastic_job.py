"""The same jobs on virtual workers.

    elastic_job.py JOB OUT LEAVE_OUT PAUSE

LEAVE_OUT, if not empty, removes one ingredient, for the negative controls; every turn waits PAUSE seconds, so that
there is time for things to happen to the job.
"""

import json
import sys
import time
from pathlib import Path

import torch
from jobs import Job, body, make_dataset, make_model, make_optimizer, make_scaler, set_flags

import concertina as ct


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    out = Path(sys.argv[2])
    leave_out, pause = sys.argv[3], float(sys.argv[4])
    if leave_out:
        from controls import LEAVE_OUT

        LEAVE_OUT[leave_out]()
    session = ct.join()
    set_flags(job)
    model = make_model(job)
    opt, sched = make_optimizer(job, model)
    scaler = make_scaler(job)
    model, opt, sched, scaler = session.prepare(model, opt, sched, scaler, **job.ddp)
    session.seed(1234)
    loader = session.loader(
        make_dataset(job), batch_size=job.batch, shuffle=True, seed=3, drop_last=job.drop_last,
        num_workers=job.num_workers, persistent_workers=job.persistent,
    )  # fmt: skip
    for epoch in session.epochs(1000):
        for batch in loader:
            time.sleep(pause)
            loss = body(job, model, opt, sched, scaler, batch, loader.index, session.no_sync)
            if session.rehearsing:
                continue
            with (out / f"loss-{session.rank}").open("a") as file:
                file.write(f"{epoch} {loader.index} {loss.double().item().hex()}\n")
            session.log(loss=loss)
    engine = session.engine
    engine.contexts.save_resident()
    for v in engine.order:
        torch.save(dict(engine.buffers.by_name(engine.contexts[v].buffers)), out / f"buffers-{v}.pt")
    if session.is_main:
        torch.save(
            {
                "params": dict(model.named_parameters()),
                "opt": opt.state_dict(),
                "sched": sched.state_dict(),
                "scaler": scaler.state_dict(),
            },
            out / "shared.pt",
        )


main()
