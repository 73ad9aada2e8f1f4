"""The same model and step as `rescale_job.py`, data-parallel without concertina: the job of the baselines.

    rescale_baseline_job.py MARKS --megabytes 100 --checkpoint FILE       restarted at every change
    rescale_baseline_job.py MARKS --megabytes 100 --store PORT --own ID   changes its group while it runs

Restarted (by torchrun or by hand): on SIGTERM all ranks end after the same step, the first writes a checkpoint, and
whoever starts next goes on from it. That loses no step, which is kinder to restarts than checkpoints at intervals.

With a store: copying at the switch. Newcomers start beside the others and are ready when they are let in; then a new
group is built, one member sends parameters and optimizer state to the newcomer, and everybody waits until it has them.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rescale_job import Marks, finish, make_model, make_optimizer

LIMIT = timedelta(seconds=300)
STOPPED_BY_A_PEER = 3


class Training:
    """Model, optimizer and one step of them."""

    def __init__(self, megabytes: float, pause: float, device: str) -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.model = make_model(megabytes).to(self.device)
        self.optimizer = make_optimizer(self.model)
        self.width = self.model[0].in_features
        self.pause = pause
        self.steps = 0

    def step(self, group: Any, flag: int) -> int:
        """One step of the whole group; the sum of all flags."""
        time.sleep(self.pause)
        self.model(torch.randn(1, self.width).to(self.device)).square().mean().backward()
        flags = torch.tensor([float(flag)])
        works = [group.allreduce([t]) for t in (flags, *(p.grad for p in self.model.parameters()))]
        for work in works:
            work.wait()
        for p in self.model.parameters():
            p.grad.div_(group.size())
        self.optimizer.step()
        self.optimizer.zero_grad()
        finish(self.device)
        self.steps += 1
        return int(flags)

    def warm(self) -> None:
        """What is made at the first step; the state that it leaves is replaced."""
        self.model(torch.randn(1, self.width).to(self.device)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        """All that a newcomer needs."""
        state = self.optimizer.state
        found = [p.detach() for p in self.model.parameters()]
        return found + [state[p][name] for p in self.model.parameters() for name in ("exp_avg", "exp_avg_sq", "step")]

    def save(self, path: Path) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "steps": self.steps}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]


def restarted(args: argparse.Namespace) -> None:
    asked = [0]
    signal.signal(signal.SIGTERM, lambda *_: asked.__setitem__(0, 1))
    dist.init_process_group("gloo", timeout=LIMIT)
    group = dist.group.WORLD
    training = Training(args.megabytes, args.pause, args.device)
    if args.checkpoint.exists():
        training.load(args.checkpoint)
    marks = Marks(args.marks, rank=dist.get_rank(), world=dist.get_world_size())
    while not training.step(group, asked[0]):
        marks.step(training.steps, 0)
    marks.step(training.steps, 0)
    if dist.get_rank() == 0:
        training.save(args.checkpoint)
    dist.barrier()
    os._exit(0 if asked[0] else STOPPED_BY_A_PEER)  # torchrun takes an end with 0 for the end of the job


# -- changes its group ----------------------------------------------------------------------------------------------


def new_group(store: Any, plan: dict[str, Any], own: int) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = LIMIT
    members = plan["members"]
    prefix = dist.PrefixStore(f"group-{plan['generation']}", store)
    return dist.ProcessGroupGloo(prefix, members.index(own), len(members), options)


def hand_state(training: Training, group: Any, plan: dict[str, Any], own: int) -> None:
    """The source sends, newcomers receive, all wait. From a GPU the state goes by way of the host, as gloo does it."""
    members = plan["members"]
    for newcomer in plan["newcomers"]:
        if own == plan["source"]:
            sent = [t.cpu() for t in training.tensors()]
            wait_for([group.send([t], members.index(newcomer), k) for k, t in enumerate(sent)])
        elif own == newcomer:
            room = [t.cpu() for t in training.tensors()]  # the tensor itself where it is on the host
            wait_for([group.recv([t], members.index(plan["source"]), k) for k, t in enumerate(room)])
            for there, t in zip(room, training.tensors(), strict=True):
                t.copy_(there)
    steps = torch.tensor([float(training.steps if own not in plan["newcomers"] else 0)])
    group.allreduce([steps], dist.ReduceOp.MAX).wait()
    training.steps = int(steps)


def wait_for(works: list[Any]) -> None:
    for work in works:
        work.wait()


def regrouping(args: argparse.Namespace) -> None:
    store = dist.TCPStore("127.0.0.1", args.store, is_master=False, timeout=LIMIT)
    own = args.own
    training = Training(args.megabytes, args.pause, args.device)
    training.warm()
    marks = Marks(args.marks, rank=own)
    store.set(f"ready-{own}", "")
    generation = args.joins
    group, plan = None, json.loads(store.get(f"plan-{generation}"))
    while own in plan["members"]:
        bygone, group = [group], new_group(store, plan, own)
        hand_state(training, group, plan, own)
        threading.Thread(target=bygone.clear).start()  # gloo takes its time to end a group
        following = f"plan-{generation + 1}"
        leads = own == plan["members"][0]
        while not training.step(group, int(leads and store.check([following]))):
            marks.step(training.steps, generation)
        marks.step(training.steps, generation)
        generation += 1
        plan = json.loads(store.get(following))
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("marks", type=Path)
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--store", type=int, default=0, help="port of the store that plans are read from")
    parser.add_argument("--own", type=int, default=0, help="number of this worker")
    parser.add_argument("--joins", type=int, default=0, help="generation that this worker joins")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.store:
        regrouping(args)
    else:
        restarted(args)


if __name__ == "__main__":
    main()
