"""A job played out under a trace of straggling rates: pure.

schedule    one pipeline under 1F1B, operation by operation
clock       what a step takes under a plan and rates
trace       injection -> spans of iterations with the same rates
states      what a migration moves, and how long that takes
samples     what GPUs would measure of themselves
grids       plans without a planner: the nominal one, and those of fewer nodes
controlled, dropping    jobs under a policy: they see one iteration after the other and change plans
limits      what no plan can be faster than
policies    names -> jobs; replay   jobs -> runs; report, picture   runs -> text, JSON, SVG
"""
