"""Which jobs are compared with DDP, and for which numbers of virtual workers."""

from jobs import Job

SMALL = {"bucket_cap_mb": 0.02}  # several buckets even for tiny models

MODELS = [
    Job("mlp-sgd", model="mlp", opt="sgd"),
    Job("cnn-sgd", model="cnn", opt="sgd", num_workers=2),
    Job("lm-adamw-clip", model="lm", opt="adamw", clip=0.5, num_workers=1),
    Job("lstm-adamw", model="lstm", opt="adamw", clip=0.3),
    Job("lm-sgd", model="lm", opt="sgd"),
    Job("cnn-adamw", model="cnn", opt="adamw"),
]

OPTIONS = [
    Job("small-buckets", ddp=SMALL),
    Job("bucket-view", ddp={**SMALL, "gradient_as_bucket_view": True}),
    Job("bucket-view-zeroed-in-place", ddp={**SMALL, "gradient_as_bucket_view": True}, set_to_none=False),
    Job("zeroed-in-place", ddp=SMALL, set_to_none=False),
    Job("zeroed-before-backward", ddp=SMALL, zero_first=True),
    Job("zeroed-in-place-before-backward", ddp=SMALL, zero_first=True, set_to_none=False),
    Job("cleared-by-hand", zero_by_hand=True),
    Job("unused", model="branchy", ddp={**SMALL, "find_unused_parameters": True}),
    Job("unused-sgd", model="branchy", opt="sgd", ddp={**SMALL, "find_unused_parameters": True}),
    Job("unused-zeroed-in-place", model="branchy", ddp={**SMALL, "find_unused_parameters": True}, set_to_none=False),
    Job("static-graph", ddp={**SMALL, "static_graph": True}),
    Job("static-graph-unused", model="halfused", ddp={**SMALL, "static_graph": True}),
    Job("own-buffers", model="cnn", opt="sgd", ddp={"broadcast_buffers": False}),
    Job("replaced-buffers", model="replacing"),
    Job("accumulate-2", model="cnn", ddp=SMALL, accumulate=2),
    Job("accumulate-3", ddp=SMALL, accumulate=3),
    Job("accumulate-in-bucket", ddp={**SMALL, "gradient_as_bucket_view": True}, accumulate=2, set_to_none=False),
    Job("accumulate-unused", model="branchy", ddp={**SMALL, "find_unused_parameters": True}, accumulate=2),
    Job("channels-last", model="cnn", ddp=SMALL, channels_last=True),
    Job("bf16-autocast", amp=True),
    Job("float64", model="mlp", dtype="float64"),
    Job("bfloat16-model", model="mlp", opt="sgd", dtype="bfloat16"),
    Job("grad-scaler", model="mlp", opt="sgd", scaler=True, clip=1.0),
    Job("frozen", model="cnn", freeze="c2"),
    Job("parameter-groups", groups=True),
    Job("uneven-tail", model="mlp", drop_last=False, samples=133),
    Job("persistent-data-workers", model="cnn", num_workers=2, persistent=True),
    Job("compiled", model="cnn", compiled="aot_eager"),  # the one backend that needs no compiler on the machine
]

# What is compared every day; the rest of JOBS is for the slow proofs.
DAILY: dict[int, list[Job]] = {2: MODELS, 3: [*MODELS, *OPTIONS], 4: MODELS, 8: MODELS[:3]}

JOBS: dict[str, tuple[Job, tuple[int, ...]]] = {
    **{job.name: (job, (2, 3, 4, 8)) for job in MODELS},
    **{job.name: (job, (3, 4)) for job in OPTIONS},
}


def together(job: Job, virtual: int) -> list[Job]:
    """The jobs whose references are computed in one launch with this one's."""
    if job in DAILY[virtual]:
        return DAILY[virtual]
    return [other for other, counts in JOBS.values() if virtual in counts and other not in DAILY[virtual]]
