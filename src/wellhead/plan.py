"""Plans: what a file of conversations becomes under one tokenizer, template and mask policy, before any GPU work.

A plan is a versioned file (`plan/<n>.parquet`); `plan/current` names the one in force. Equal inputs under an equal
overlay are never tokenised twice, and states never depend on anything but the token ids that a plan names.
"""

from __future__ import annotations

from wellhead.plan_read import Plan, PlanRow

__all__ = ["Plan", "PlanRow"]
