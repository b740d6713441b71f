"""A running job moved into any plan, with Megatron's own parts.

view        what Megatron's globals say to a rank under a plan
stage       the rank's model and optimizer, made by Megatron's builders under a view
state       what a rank holds, from Megatron's ShardedTensor metadata
gradients   sums over the owners of each slice
steps       Megatron's schedule on every rank, and one loss for all
switch      from one stage to the next: all ranks, or none
"""
