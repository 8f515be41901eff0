"""Real trained models to deploy: text, audio and vision; their weights come out of packages, see README.md."""
