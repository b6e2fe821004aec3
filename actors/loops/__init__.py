"""Agent loops: how an agent and a world take turns. They see messages; only the recorder sees tokens."""
