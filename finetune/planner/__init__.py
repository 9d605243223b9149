"""What will happen, derived before anything is loaded: recipe x backend x processes -> Plan."""

from finetune.planner.plan import Plan, plan

__all__ = ["Plan", "plan"]
