"""What is refused, one list per moment: docs/refusals.md is written from these lists.

`request` asks the planner's list first (`planner.rules`), then `files` and `machine`, all without
torch; `model` and `start` ask in the order in which a training builds what they look at.
"""
