"""AsyFunc's evaluation: bursts on six models, under its own rules, its baselines' and ours."""
