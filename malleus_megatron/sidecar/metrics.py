"""What Prometheus is told of a job."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from malleus_megatron import __version__
from malleus_megatron.control.controller import Controller
from malleus_megatron.pages.phases import memory
from malleus_megatron.plan.rates import HEALTHY
from malleus_megatron.sidecar.monitor import Monitor

_MIB = 2**20


def metrics_text(controller: Controller | None, monitor: Monitor) -> str:
    """The whole answer; before a job is known, only that the sidecar is up."""
    families: list[Metric] = [
        _by_label("malleus_build_info", "Always 1.", "version", {__version__: 1}),
        _gauge("malleus_job_known", "1 once a job has described itself.", float(bool(controller))),
    ]
    if controller is not None:
        families += [*_of_the_decision(controller), *_of_the_job(controller, monitor)]
        families += _counters(monitor)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Known([family for family in families if family.samples]))
    return generate_latest(registry).decode()


class _Known(Collector):
    """What is known now; a metric without a value is left out."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _gauge(name: str, text: str, value: float | None) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _by_label(name: str, text: str, label: str, values: Mapping[object, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for content, value in values.items():
        family.add_metric([str(content)], value)
    return family


def _of_the_decision(controller: Controller) -> Iterator[Metric]:
    decision, seen = controller.decision, controller.seen
    if decision is None or seen is None:
        return
    layout = controller.job.layout
    named, gpus = dict(decision.rates), sorted(layout.all_gpus())
    yield _by_label(
        "malleus_gpu_rate",
        "Time of a GPU over a healthy one's; +Inf: failed.",
        "gpu",
        {gpu: named.get(gpu, HEALTHY) for gpu in gpus},
    )
    yield _by_label(
        "malleus_gpu_straggler",
        "1 if the GPU is a straggler now.",
        "gpu",
        {gpu: int(gpu in decision.stragglers) for gpu in gpus},
    )
    yield _by_label(
        "malleus_pipeline_microbatches",
        "Micro-batches of each pipeline in a step.",
        "pipeline",
        dict(enumerate(seen.microbatch_counts)),
    )
    yield _gauge("malleus_stragglers", "Stragglers now.", len(decision.stragglers))
    yield _gauge(
        "malleus_common_rate",
        "Time of all healthy GPUs together over the least that it has been.",
        decision.common_rate,
    )
    yield _gauge("malleus_iteration", "The last iteration that has ended.", seen.iteration)
    yield _gauge("malleus_generation", "Plans that were applied so far.", seen.generation)
    yield _gauge("malleus_standby_gpus", "GPUs that hold no layer.", len(layout.standby))
    yield _gauge(
        "malleus_predicted_step_time_seconds",
        "What stages measure, put together to a step under the present micro-batch counts.",
        decision.step_time_s,
    )


def _of_the_job(controller: Controller, monitor: Monitor) -> Iterator[Metric]:
    steps = monitor.history.steps
    last = steps[-1] if steps else None
    yield _gauge(
        "malleus_step_time_seconds", "Of the last step.", None if last is None else last.step_time_s
    )
    yield _gauge("malleus_loss", "Of the last step.", None if last is None else last.loss)
    level = controller.job.level.name
    text = "1 for the level at which the job runs."
    yield _by_label("malleus_level", text, "level", {level: 1})
    used = memory(monitor.history)
    yield _by_label(
        "malleus_gpu_memory_peak_bytes",
        "Peak of a step, when it was last measured.",
        "gpu",
        {
            gpu: mib * _MIB
            for gpu, mib in enumerate(used.measured_mib if used else ())
            if mib is not None
        },
    )


def _counters(monitor: Monitor) -> Iterator[Metric]:
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
        yield CounterMetricFamily(name, text, value=value)
