"""Real trained models to deploy: text, audio and vision. README.md says which packages contain their weights."""
