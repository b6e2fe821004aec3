"""On-policy distillation (GKD, arXiv:2306.13649; as a policy gradient: Lu and Thinking Machines Lab, 2025).

The student's own tokens are graded by a teacher: A = log π_teacher − log π_old of each token, the negative of a
one-sample estimate of the reverse KL divergence, undiscounted. Rewards are not used. The teacher is the model
`learner.teacher`, or its logprobs are given with the batch (`Trainer.train(trajectories, teacher=…)`).
"""

from __future__ import annotations

from troupe.learner.advantages import Array, Group, advantage


@advantage("distill", needs=["old", "teacher"], compares=False)
def distill(group: Group) -> list[Array]:
    """Advantages, one per policy token."""
    return [teacher - old for teacher, old in zip(group.teacher, group.old, strict=True)]
