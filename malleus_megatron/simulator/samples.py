"""What the GPUs of a simulated job measure of themselves in an iteration."""

from malleus_megatron.control.values import Observation
from malleus_megatron.cost.stage import extra_layers, layer_time_s
from malleus_megatron.detector.samples import Sample
from malleus_megatron.plan.codec import plan_id
from malleus_megatron.plan.plan import Pipeline, Plan
from malleus_megatron.plan.problem import Model
from malleus_megatron.plan.rates import HEALTHY, Rates


class Sampler:
    """Exact samples: each GPU's own time, without waits, and a probe of each standby GPU."""

    def __init__(self, model: Model, forward_share: float) -> None:
        """Take what healthy GPUs take, and the forward's part of it."""
        self._model = model
        self._forward_share = forward_share

    def observation(
        self, plan: Plan, rates: Rates, *, iteration: int, generation: int
    ) -> Observation:
        """One iteration as the controller is told of it."""
        rate = dict(rates)
        samples = (
            self._sample(iteration, pipeline, stage, gpu, rate.get(gpu, HEALTHY))
            for pipeline in plan.pipelines
            for stage in range(len(pipeline.stages))
            for gpu in pipeline.stages[stage].gpus
        )
        return Observation(
            iteration=iteration,
            generation=generation,
            plan_id=plan_id(plan),
            microbatch_counts=plan.microbatch_counts,
            samples=tuple(samples),
            probes=tuple((gpu, rate.get(gpu, HEALTHY)) for gpu in plan.standby),
        )

    def _sample(
        self, iteration: int, pipeline: Pipeline, index: int, gpu: int, rate: float
    ) -> Sample:
        stage = pipeline.stages[index]
        layer_s = layer_time_s(self._model, len(stage.gpus), rate)
        ends = extra_layers(self._model, first=index == 0, last=index == len(pipeline.stages) - 1)
        stage_s = layer_s * (stage.num_layers + ends)
        forward, backward = self._forward_share, 1 - self._forward_share
        return Sample(
            gpu=gpu,
            iteration=iteration,
            layer_forward_s=layer_s * forward,
            layer_backward_s=layer_s * backward,
            stage_forward_s=stage_s * forward,
            stage_backward_s=stage_s * backward,
            num_layers=stage.num_layers,
            num_microbatches=pipeline.num_microbatches,
        )
