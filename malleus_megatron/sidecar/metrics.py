"""What Prometheus is told of a job."""

from collections.abc import Iterator

from malleus_megatron import __version__
from malleus_megatron.control.controller import Controller
from malleus_megatron.pages.phases import memory
from malleus_megatron.plan.rates import HEALTHY
from malleus_megatron.sidecar.exposition import Family, Sample, counter, expose, gauge
from malleus_megatron.sidecar.monitor import Monitor

_MIB = 2**20


def metrics_text(controller: Controller | None, monitor: Monitor) -> str:
    """The whole answer; before a job is known, only that the sidecar is up."""
    version: list[Sample] = [({"version": __version__}, 1)]
    families = [
        Family(name="malleus_build_info", kind="gauge", text="Always 1.", samples=version),
        gauge("malleus_job_known", "1 once a job has described itself.", float(bool(controller))),
    ]
    if controller is not None:
        families += [*_of_the_decision(controller), *_of_the_job(controller, monitor)]
        families += _counters(monitor)
    return expose(families)


def _of_the_decision(controller: Controller) -> Iterator[Family]:
    decision, seen = controller.decision, controller.seen
    if decision is None or seen is None:
        return
    layout = controller.job.layout
    named = dict(decision.rates)
    rates: list[Sample] = [
        ({"gpu": gpu}, named.get(gpu, HEALTHY)) for gpu in sorted(layout.all_gpus())
    ]
    slow: list[Sample] = [
        ({"gpu": gpu}, int(gpu in decision.stragglers)) for gpu in sorted(layout.all_gpus())
    ]
    counts: list[Sample] = [
        ({"pipeline": number}, count) for number, count in enumerate(seen.microbatch_counts)
    ]
    for name, text, samples in (
        ("malleus_gpu_rate", "Time of a GPU over a healthy one's; +Inf: failed.", rates),
        ("malleus_gpu_straggler", "1 if the GPU is a straggler now.", slow),
        ("malleus_pipeline_microbatches", "Micro-batches of each pipeline in a step.", counts),
    ):
        yield Family(name=name, kind="gauge", text=text, samples=samples)
    yield gauge("malleus_stragglers", "Stragglers now.", len(decision.stragglers))
    yield gauge(
        "malleus_common_rate",
        "Time of all healthy GPUs together over the least that it has been.",
        decision.common_rate,
    )
    yield gauge("malleus_iteration", "The last iteration that has ended.", seen.iteration)
    yield gauge("malleus_generation", "Plans that were applied so far.", seen.generation)
    yield gauge("malleus_standby_gpus", "GPUs that hold no layer.", len(layout.standby))
    yield gauge(
        "malleus_predicted_step_time_seconds",
        "What stages measure, put together to a step under the present micro-batch counts.",
        decision.step_time_s,
    )


def _of_the_job(controller: Controller, monitor: Monitor) -> Iterator[Family]:
    steps = monitor.history.steps
    last = steps[-1] if steps else None
    yield gauge(
        "malleus_step_time_seconds", "Of the last step.", None if last is None else last.step_time_s
    )
    yield gauge("malleus_loss", "Of the last step.", None if last is None else last.loss)
    level: list[Sample] = [({"level": controller.job.level.name}, 1)]
    text = "1 for the level at which the job runs."
    yield Family(name="malleus_level", kind="gauge", text=text, samples=level)
    used = memory(monitor.history)
    peaks: list[Sample] = [
        ({"gpu": gpu}, mib * _MIB)
        for gpu, mib in enumerate(used.measured_mib if used else ())
        if mib is not None
    ]
    text = "Peak of a step, when it was last measured."
    yield Family(name="malleus_gpu_memory_peak_bytes", kind="gauge", text=text, samples=peaks)


def _counters(monitor: Monitor) -> Iterator[Family]:
    counts = monitor.counts
    for name, text, value in (
        ("malleus_plans_offered_total", "Plans that the job was asked to take.", counts["offers"]),
        ("malleus_plans_rejected_total", "Offers that the job refused.", counts["refusals"]),
        ("malleus_plans_applied_total", "Plans that the job went over to.", counts["event plan"]),
        (
            "malleus_planning_seconds_total",
            "Time that went into the plans that were offered.",
            counts["planning_us"] / 1e6,
        ),
        ("malleus_migrations_total", "Migrations.", counts["event migration"]),
        ("malleus_migration_seconds_total", "Time they took.", counts["migration_us"] / 1e6),
        ("malleus_migration_bytes_total", "What they moved.", counts["migration_bytes"]),
        ("malleus_warnings_total", "Warnings of the job.", counts["event warning"]),
        ("malleus_bad_events_total", "Events that could not be read.", counts["bad events"]),
    ):
        yield counter(name, text, value)
