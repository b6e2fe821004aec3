"""Where agents act: the environment interface, the built-in worlds and their scripted players. No Ray, no torch."""
