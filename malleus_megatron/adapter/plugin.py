"""The plugin in one training process: from its installation to the end of training."""

from collections.abc import Callable
from typing import Any

from megatron.core import mpu

from malleus_megatron.adapter.data import Batches, BuildLoader, NominalReader
from malleus_megatron.adapter.job import Job
from malleus_megatron.adapter.saves import Saves
from malleus_megatron.adapter.setup import JobSetup, begin_setup, finish_setup
from malleus_megatron.config import MalleusConfig
from malleus_megatron.runtime.patching import Installed
from malleus_megatron.runtime.waits import wait_rows


class Plugin:
    """What the seams call. Until `set_up`, `job` is None and training is stock."""

    def __init__(self, config: MalleusConfig) -> None:
        """Hold the settings; nothing else happens before Megatron has made its groups."""
        self.config = config
        self.job: Job | None = None
        self.saves: Saves | None = None
        """Outlives the job: Megatron saves once more after its training loop."""
        self._setup: JobSetup | None = None
        self._waits: Installed | None = None
        self._loaders_built = 0
        self._reads = True
        """Whether this rank reads data in stock."""

    def before_model(self, containers: Any, collection: Any) -> None:
        """Decide the level and read the user's files, before anything expensive is built.

        Args:
            containers: Megatron's configuration of the job; None where the script builds its model.
            collection: Megatron's process groups.

        Raises:
            MalleusError: on all ranks together.
        """
        self._setup = begin_setup(self.config, containers, collection)

    def set_up(self, built: tuple[list[Any], Any, Any]) -> None:
        """Make the job around the model, optimizer and scheduler that were built.

        Raises:
            MalleusError: on all ranks together.
        """
        if self._setup is None:
            raise AssertionError("set_up comes after before_model")
        self.job = finish_setup(self._setup, built)
        self.saves = self.job.saves
        self._waits = Installed(wait_rows(self.job.clock))

    def is_built_here(self, stock: Callable[[], bool]) -> Callable[[], bool]:
        """Whether a rank builds the data: in a job that may be reshaped all do, for any may read.

        Args:
            stock: The recipe's own rule.
        """
        if self.job is None or not self.job.may_reshape:
            return stock
        self._reads = bool(stock())
        return lambda: True

    def loader(self, dataset: Any, consumed_samples: int, *, build: BuildLoader) -> Any:
        """The loader for one of Megatron's datasets: ours for training and validation.

        Megatron builds the training loader first, the validation loader next, except under
        --skip-train, where the level is observe.
        """
        self._loaders_built += 1
        job, number = self.job, self._loaders_built
        if job is None or not job.moves_microbatches or dataset is None:
            return build(dataset, consumed_samples)
        if number > (2 if job.may_reshape else 1):
            return build(dataset, consumed_samples)
        batches = Batches(
            dataset,
            consumed_samples,
            build=build,
            pause=job.clock.pause,
            nominal=NominalReader(
                data_parallel_rank=mpu.get_data_parallel_rank(),
                data_parallel_size=mpu.get_data_parallel_world_size(),
                reads=self._reads,
            ),
        )
        if number == 1:
            job.batches = batches
        else:
            job.evaluation.batches = batches
        return batches

    def finish(self, *, together: bool) -> None:
        """End the job.

        Args:
            together: All ranks are here, so the last iteration can be exchanged.
        """
        if self.job is not None:
            self.job.finish(together=together)
            self.job = None
        if self._waits is not None:
            self._waits.uninstall()
