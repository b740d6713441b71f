"""Everything that knows Megatron: seams, levels, data, schedule, the iteration boundary."""
