"""A job that cannot go back to its nominal stages: the last rank fails on the way."""

from typing import Any

from malleus_megatron import pretrain_gpt
from malleus_megatron.adapter.reshape.switch import Switch


def main() -> None:
    def to_nominal(self: Switch, iteration: int) -> Any:
        agreement = self._agreement

        def fail() -> None:
            if agreement.rank == agreement.world_size - 1:
                raise RuntimeError("it fails here")

        return agreement.together("going back", fail)

    Switch.to_nominal = to_nominal  # type: ignore[method-assign]
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
