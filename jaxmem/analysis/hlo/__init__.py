"""The compiled program as text: instructions, types, loops and the FLOPs of its products."""
