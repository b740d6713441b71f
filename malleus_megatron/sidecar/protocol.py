"""JSON between the job and its sidecar: one document a request, one an answer.

Plans and rates look as in plan.json and rates.json. JSON has no NaN, so a time that was not
measured is null.
"""

import json
import math
from dataclasses import MISSING, asdict, fields
from typing import Any

from malleus_megatron.config import Level
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import (
    Decision,
    Detection,
    Freedom,
    JobDescription,
    Observation,
)
from malleus_megatron.detector.samples import Sample
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.codec import (
    canonical_json,
    plan_from_json,
    plan_to_json,
    rates_from_json,
    rates_to_json,
)
from malleus_megatron.plan.fields import (
    as_dict,
    as_float,
    as_int,
    as_list,
    check_version,
    required,
)
from malleus_megatron.plan.problem_codec import memory_from_json
from malleus_megatron.plan.rates import HEALTHY, Rates

SCHEMA_VERSION = 1
MAX_MESSAGE_BYTES = 8 * 2**20
"""Of a request and of an answer; the samples of 10,000 GPUs take a quarter of it."""

_MAX_DIGITS = 18


def encode(document: dict[str, Any]) -> bytes:
    """The document as canonical JSON with its schema version."""
    return canonical_json({"schema_version": SCHEMA_VERSION} | document).encode()


def decode(data: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object of this schema version.

    Raises:
        BadInputError: not JSON, NaN or infinity in it, no object, or another version.
    """
    try:
        document = json.loads(data, parse_constant=_no_constant, parse_int=_bounded_int)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{where} is not JSON: {error}.") from error
    body = as_dict(document, where)
    check_version(body, SCHEMA_VERSION, where)
    return body


def job_to_json(job: JobDescription, policy: Policy) -> dict[str, Any]:
    """The job's layouts, level and freedom, and the settings to begin with."""
    return {
        "nominal": plan_to_json(job.nominal),
        "present": None if job.present is None else plan_to_json(job.present),
        "level": job.level.name,
        "freedom": None if job.freedom is None else _freedom_to_json(job.freedom),
        "switch_s": job.switch_s,
        "settings": policy_to_json(policy),
    }


def job_from_json(body: dict[str, Any]) -> tuple[JobDescription, Policy]:
    """Read what `job_to_json` wrote.

    Without `settings` the defaults hold, without `present` the nominal layout; without `freedom`
    only micro-batches move.
    """
    level = str(required(body, "level", "job"))
    if level not in Level.__members__:
        raise BadInputError(f"job.level: {level!r} is none of {', '.join(Level.__members__)}.")
    nominal = plan_from_json(required(body, "nominal", "job"), "job.nominal")
    policy = changed_policy(Policy(), as_dict(body.get("settings", {}), "job.settings"))
    present, freedom = body.get("present"), body.get("freedom")
    switch_s = body.get("switch_s")
    job = JobDescription(
        nominal=nominal,
        level=Level[level],
        freedom=None if freedom is None else _freedom(as_dict(freedom, "job.freedom")),
        present=None if present is None else plan_from_json(present, "job.present"),
        switch_s=None if switch_s is None else as_float(switch_s, "job.switch_s"),
    )
    return job, policy


def _freedom_to_json(freedom: Freedom) -> dict[str, Any]:
    memory = freedom.memory
    return {
        "gpus_per_node": list(freedom.cluster.gpus_per_node),
        "memory_mib": freedom.cluster.memory_mib,
        "tensor_parallel_sizes": list(freedom.tensor_parallel_sizes),
        "layer_time_s": {str(degree): time_s for degree, time_s in freedom.layer_time_s},
        "memory": None if memory is None else asdict(memory),
    }


def _freedom(body: dict[str, Any]) -> Freedom:
    where = "job.freedom"
    memory_mib, memory = body.get("memory_mib"), body.get("memory")
    times = as_dict(body.get("layer_time_s", {}), f"{where}.layer_time_s")
    return Freedom(
        cluster=Cluster(
            gpus_per_node=_whole_numbers(body, "gpus_per_node", where),
            memory_mib=None if memory_mib is None else as_float(memory_mib, f"{where}.memory_mib"),
        ),
        tensor_parallel_sizes=_whole_numbers(body, "tensor_parallel_sizes", where),
        layer_time_s=tuple(
            sorted(
                (_degree(key, where), as_float(time_s, f"{where}.layer_time_s[{key!r}]"))
                for key, time_s in times.items()
            )
        ),
        memory=None
        if memory is None
        else memory_from_json(as_dict(memory, f"{where}.memory"), f"{where}.memory"),
    )


def _degree(key: str, where: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= _MAX_DIGITS):
        raise BadInputError(f"{where}.layer_time_s: {key[:40]!r} is not a TP degree.")
    return int(key)


def _whole_numbers(body: dict[str, Any], name: str, where: str) -> tuple[int, ...]:
    place = f"{where}.{name}"
    return tuple(as_int(number, place) for number in as_list(required(body, name, where), place))


def policy_to_json(policy: Policy) -> dict[str, float]:
    """Every setting by its name."""
    return {setting.name: getattr(policy, setting.name) for setting in fields(Policy)}


def changed_policy(policy: Policy, changes: dict[str, Any]) -> Policy:
    """The policy with the named settings changed.

    Raises:
        BadInputError: an unknown name or a value that has no sense.
    """
    values = policy_to_json(policy)
    for name, value in changes.items():
        if name == "schema_version":
            continue
        if name not in values:
            raise BadInputError(f"Unknown setting {name!r}. Known: {', '.join(values)}.")
        whole = isinstance(values[name], int)
        values[name] = as_int(value, name) if whole else as_float(value, name)
    return Policy(**values)  # type: ignore[arg-type]


def observation_to_json(observation: Observation) -> dict[str, Any]:
    """One iteration's samples and counts."""
    return {
        "iteration": observation.iteration,
        "generation": observation.generation,
        "plan_id": observation.plan_id,
        "microbatch_counts": list(observation.microbatch_counts),
        "probes": rates_to_json(Rates(by_gpu=observation.probes)),
        "samples": [_sample_to_json(sample) for sample in observation.samples],
    }


def events_from_json(body: dict[str, Any]) -> list[Any] | None:
    """What the job has written into its log meanwhile; None from a job that does not tell.

    Each is for the reader to check: what a page cannot show must not end a decision.
    """
    events = body.get("events")
    return None if events is None else as_list(events, "samples.events")


def observation_from_json(body: dict[str, Any]) -> Observation:
    """Read what `observation_to_json` wrote."""
    counts = as_list(required(body, "microbatch_counts", "samples"), "microbatch_counts")
    samples = as_list(required(body, "samples", "samples"), "samples")
    return Observation(
        iteration=as_int(required(body, "iteration", "samples"), "iteration"),
        generation=as_int(required(body, "generation", "samples"), "generation"),
        plan_id=str(required(body, "plan_id", "samples")),
        microbatch_counts=tuple(as_int(count, "microbatch_counts") for count in counts),
        samples=tuple(
            _sample_from_json(sample, f"samples[{index}]") for index, sample in enumerate(samples)
        ),
        probes=rates_from_json(body.get("probes", {}), "probes").by_gpu,
    )


def decision_to_json(decision: Decision) -> dict[str, Any]:
    """The answer to an observation."""
    return {
        "iteration": decision.iteration,
        "rates": rates_to_json(decision.rates),
        "stragglers": list(decision.stragglers),
        "detections": [asdict(detection) for detection in decision.detections],
        "common_rate": decision.common_rate,
        "ignored": list(decision.ignored),
        "step_time_s": decision.step_time_s,
        "offer": None if decision.offer is None else plan_to_json(decision.offer),
        "asks_probe": decision.asks_probe,
        "warning": decision.warning,
    }


def decision_from_json(body: dict[str, Any]) -> Decision:
    """Read what `decision_to_json` wrote."""
    step_time_s, offer = body.get("step_time_s"), body.get("offer")
    return Decision(
        iteration=as_int(required(body, "iteration", "answer"), "iteration"),
        rates=rates_from_json(required(body, "rates", "answer"), "rates"),
        stragglers=_whole_numbers(body, "stragglers", "answer"),
        detections=tuple(
            _detection(detection) for detection in as_list(body.get("detections", []), "detections")
        ),
        common_rate=as_float(body.get("common_rate", HEALTHY), "common_rate"),
        ignored=_whole_numbers(body, "ignored", "answer"),
        step_time_s=None if step_time_s is None else as_float(step_time_s, "step_time_s"),
        offer=None if offer is None else plan_from_json(offer, "offer"),
        asks_probe=body.get("asks_probe", False) is True,
        warning=str(body.get("warning", "")),
    )


def _detection(document: Any) -> Detection:
    body = as_dict(document, "detections")
    return Detection(
        **{
            part.name: as_int(required(body, part.name, "detections"), f"detections.{part.name}")
            for part in fields(Detection)
        }
    )


def _sample_to_json(sample: Sample) -> dict[str, Any]:
    values = {part.name: getattr(sample, part.name) for part in fields(Sample)}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _sample_from_json(document: Any, where: str) -> Sample:
    body = as_dict(document, where)
    values: dict[str, Any] = {}
    for part in fields(Sample):
        place = f"{where}.{part.name}"
        if part.default is not MISSING and part.name not in body:
            continue
        value = required(body, part.name, where)
        if part.type is int:
            values[part.name] = as_int(value, place)
        else:
            values[part.name] = math.nan if value is None else as_float(value, place)
    return Sample(**values)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _bounded_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)
