"""Derive a plan before anything is loaded: recipe x backend x processes -> Plan.

`predict` puts a plan on a machine: memory, communication, time, and whether it fits.
"""

from finetune.planner.plan import Plan, plan

__all__ = ["Plan", "plan"]
