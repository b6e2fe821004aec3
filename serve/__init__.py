"""How others reach it: the Ray Serve application."""
