"""The views on calls for operators: what the engine's events and streams tell, in other words."""
