"""Each Python process of a vLLM server dies with the one that started it, also when that is killed: vLLM's own would stay.

Runs in vLLM's interpreter, without Troupe, at the start of every process of the server, as its `sitecustomize`.
"""

import ctypes
import signal

PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
