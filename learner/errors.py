"""What the learner refuses to do, as typed errors."""

from __future__ import annotations

from troupe.protocol.errors import TroupeError


class BatchError(TroupeError):
    """A batch that must not be trained on: broken trajectories, unpredictable tokens, advantages of a wrong shape."""


class Diverged(TroupeError):
    """The loss or the gradient stopped being a finite number; the weights were left as they were before the step."""
