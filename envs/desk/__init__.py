"""A desk where customers are served by policy: its records, what customers ask for, the customers, and the world."""
