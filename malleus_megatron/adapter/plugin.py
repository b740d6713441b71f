"""The plugin in one training process: from its installation to the end of training."""

from typing import Any

from malleus_megatron.adapter.data import BuildLoader, TrainBatches
from malleus_megatron.adapter.job import Job
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
        self._setup: JobSetup | None = None
        self._waits: Installed | None = None
        self._loaders_built = 0

    def before_model(self) -> None:
        """Decide the level and read the user's files, before anything expensive is built.

        Raises:
            MalleusError: on all ranks together.
        """
        self._setup = begin_setup(self.config)

    def set_up(self, model: list[Any]) -> None:
        """Make the job around the model that was built.

        Raises:
            MalleusError: on all ranks together.
        """
        if self._setup is None:
            raise AssertionError("set_up comes after before_model")
        self.job = finish_setup(self._setup, model)
        self._waits = Installed(wait_rows(self.job.clock))

    def loader(self, dataset: Any, consumed_samples: int, *, build: BuildLoader) -> Any:
        """The loader for one of Megatron's datasets: ours for training, stock for the others.

        Megatron builds the training loader first, except under --skip-train, where the level is
        observe.
        """
        self._loaders_built += 1
        first = self._loaders_built == 1
        if self.job is None or not self.job.moves_microbatches or not first or dataset is None:
            return build(dataset, consumed_samples)
        self.job.batches = TrainBatches(
            dataset, consumed_samples, build=build, pause=self.job.clock.pause
        )
        return self.job.batches

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
