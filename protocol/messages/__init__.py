"""What the actors say to each other: one frozen vocabulary, one request type in, one reply type out.

There is a file for each actor that is spoken to, and `common` for what concerns several. All names can be imported from here,
and each is the message's name on the wire (see `codec.py`). Promises:
- pure data: no Ray, no torch; every field has a type that `codec` checks when the message arrives;
- bulk (weights, batches) travels beside the message as a `Blob`, so that a host can pass it without copying.

Times are seconds, token ids int32, logprobs float32 natural logarithms. `version` counts weight updates; 0 is the
policy after its cold start.
"""

from troupe.protocol.messages.common import *  # noqa: F403
from troupe.protocol.messages.director import *  # noqa: F403
from troupe.protocol.messages.dispatcher import *  # noqa: F403
from troupe.protocol.messages.env_pool import *  # noqa: F403
from troupe.protocol.messages.evaluator import *  # noqa: F403
from troupe.protocol.messages.generator import *  # noqa: F403
from troupe.protocol.messages.learner import *  # noqa: F403
from troupe.protocol.messages.store import *  # noqa: F403
