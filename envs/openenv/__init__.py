"""Our worlds as OpenEnv environments, for the clients and the trainers of OpenEnv 0.10. Its package is never imported here.

`wire` is what is said, `session` one client's world, `server` the doors to them. The other direction, an OpenEnv server as a
world of ours, is `troupe.envs.adapters.openenv`.
"""
