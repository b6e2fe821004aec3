"""What an answer or a state is worth: verifiers, and how several make one reward. No Ray, no torch.

Promises:
- a verifier is anything that is called with one thing and gives a number: a plain function, synchronous or `async`, will do;
- what an agent said, however odd, gives a number. Whatever else goes wrong (a verifier that raises, hangs or gives no finite
  number, a judge that cannot be reached) is EnvironmentFailed or TaskFailed: a broken episode, never a zero (law 6);
- every wait is bounded.
"""

from troupe.envs.verifiers.composition import Composition, Verifier, of
from troupe.envs.verifiers.judge import Judge
from troupe.envs.verifiers.sql import ExecutionMatch
from troupe.envs.verifiers.state import StateMatch, differences
from troupe.envs.verifiers.symbolic import Symbolic
from troupe.envs.verifiers.text import F1, Exact, Format
from troupe.envs.verifiers.unit_tests import Case, UnitTests

__all__ = [
    "F1",
    "Case",
    "Composition",
    "Exact",
    "ExecutionMatch",
    "Format",
    "Judge",
    "StateMatch",
    "Symbolic",
    "UnitTests",
    "Verifier",
    "differences",
    "of",
]
