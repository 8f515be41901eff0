"""AsyFunc's evaluation: bursts on six models, by its own rules, its baselines' and ours."""
