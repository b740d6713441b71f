"""Everything that knows torch but not Megatron: patching, clocks, pace, injection, agreement."""
