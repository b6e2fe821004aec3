"""What is said: ids, messages, the trajectory, Arrow schemas and the codec. Pure data: no Ray, no torch."""
