"""Who owns which slice of a model's state, and what must move when owners change: pure.

holdings    what each GPU has, as boxes of global tensors: one notion for all that follows
transfers   held and needed -> each missing element from one owner; senders picks the owner
rounds      transfers -> rounds of bounded size
batches     blocks of state that come, what moves into them, and blocks that leave
memory      which way a switch keeps within a bound: both states whole, or old state leaving
owners      holdings under one plan -> slices and the groups of GPUs that sum them
"""
