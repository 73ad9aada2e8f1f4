"""The same jobs on virtual workers. `--leave-out NAME` removes one ingredient, for the negative controls."""

import json
import sys
from pathlib import Path

import torch
from jobs import Job, body, make_dataset, make_model, make_optimizer, make_scaler, set_flags

import concertina as ct


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    out = Path(sys.argv[2])
    if len(sys.argv) > 3:
        from controls import LEAVE_OUT

        LEAVE_OUT[sys.argv[3]]()
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
    for _ in session.epochs(1000):
        for batch in loader:
            loss = body(job, model, opt, sched, scaler, batch, loader.index, session.no_sync)
            with (out / f"loss-{session.rank}").open("a") as file:
                file.write(loss.double().item().hex() + "\n")
            session.log(loss=loss)
    engine = session.engine
    engine._save_resident()
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
