"""Derive a plan before anything is loaded: recipe x backend x processes -> Plan.

`estimate.predict` predicts memory, communication and time on a machine, and whether it fits.
"""

from finetune.planner.plan import Plan, plan

__all__ = ["Plan", "plan"]
